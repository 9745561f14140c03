"""A folder that the package `kernels` loads as a kernel, so that transformers takes us by a name of its hub.

write makes the folder: a build for each device, which holds the functions of flash-attn and its metadata. Nothing is
compiled into it: it imports the minimal_attn that is installed.

    python -m minimal_attn.integrations.kernels FOLDER
"""

import argparse
import json
from pathlib import Path

from .. import __version__

# transformers treats names with "flash" in them as flash-attn, and packs padded batches for them. With "flash" and
# then a 3, its continuous batching decodes by flash_attn_with_kvcache.
NAME = "minimal-attn/minimal-flash-attn3"
FUNCTIONS = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
             "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
             "pad_input", "unpad_input"]
SOURCE = f'''"""The functions of flash-attn by minimal_attn, which must be installed."""

from minimal_attn import {", ".join(FUNCTIONS)}

__all__ = {FUNCTIONS}
'''


def write(folder: str | Path) -> str:
    """Write the kernel to folder/build, over what write has written there before.

    Returns:
        The value of the environment variable LOCAL_KERNELS with which attn_implementation=NAME loads it.

    Raises:
        ValueError: a path with a colon, at which LOCAL_KERNELS would be cut.
    """
    folder = Path(folder).resolve()
    if ":" in str(folder):
        raise ValueError(f"folder must not have a colon in its path, which LOCAL_KERNELS cuts there, got {folder}")
    for device in ("cpu", "cuda"):
        build = folder / "build" / f"torch-{device}"
        build.mkdir(parents=True, exist_ok=True)
        (build / "__init__.py").write_text(SOURCE)
        metadata = {"name": "minimal-flash-attn3", "version": 1, "license": "MIT", "python-depends": [],
                    "id": f"_minimal_flash_attn3_{device}_{__version__.replace('.', '_')}", "backend": {"type": device}}
        (build / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return f"{NAME}={folder}"


def main(argv: list[str] | None = None) -> None:
    """Write the kernel to a folder and print how to use it."""
    parser = argparse.ArgumentParser(prog="python -m minimal_attn.integrations.kernels", description=main.__doc__)
    parser.add_argument("folder", help="where to write the kernel")
    print(f"export LOCAL_KERNELS={write(parser.parse_args(argv).folder)}")


if __name__ == "__main__":
    main()
