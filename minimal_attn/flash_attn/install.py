"""install_as_flash_attn: `import flash_attn` finds our functions, for code that cannot be changed. One finder on
sys.meta_path answers for three modules, and for importlib.metadata, which libraries ask too.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import threading

from . import bert_padding, flash_attn_interface

VERSION = "2.8.3"  # of the functions that flash_attn_interface.py has
MODULES = {"flash_attn": flash_attn_interface, "flash_attn.flash_attn_interface": flash_attn_interface,
           "flash_attn.bert_padding": bert_padding}
TEXTS = {"METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n"
                     "Summary: the functions of minimal_attn under the names of flash-attn\n",
         "top_level.txt": "flash_attn\n"}

_LOCK = threading.Lock()


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename):
        return TEXTS.get(filename)

    def locate_file(self, path):
        raise FileNotFoundError(f"{path}: flash-attn is not installed, minimal_attn stands in for it")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname not in MODULES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin="minimal_attn",
                                              is_package=fullname == "flash_attn")

    def exec_module(self, module):
        source = MODULES[module.__name__]
        names = "__doc__", "__getattr__", "__all__", *source.__all__
        module.__dict__.update({name: getattr(source, name) for name in names}, __version__=VERSION)

    def find_distributions(self, context=importlib.metadata.DistributionFinder.Context()):
        if context.name is None or re.sub(r"[-_.]+", "-", context.name).lower() == "flash-attn":
            yield _Distribution()


_FINDER = _Finder()


def install_as_flash_attn() -> None:
    """Let `import flash_attn` find our functions, in this process: flash_attn, flash_attn.flash_attn_interface and
    flash_attn.bert_padding, of version 2.8.3 for importlib.metadata too.

    Call it before the code that imports flash_attn is imported, since that code may look once. Any thread may call it,
    and processes that are forked later have it too. RuntimeError: another flash_attn is installed or imported.
    """
    with _LOCK:
        if _FINDER in sys.meta_path:
            return
        if found := _other_flash_attn():
            raise RuntimeError(f"{found}; install_as_flash_attn does not replace it: uninstall it, or import the "
                               "functions from minimal_attn")
        sys.meta_path.append(_FINDER)
        _forget_what_transformers_saw()


def uninstall_as_flash_attn() -> None:
    """Undo install_as_flash_attn, if it was called, from any thread. Code that has imported flash_attn keeps ours."""
    with _LOCK:
        if _FINDER not in sys.meta_path:
            return
        sys.meta_path.remove(_FINDER)
        for name in MODULES:
            if getattr(getattr(sys.modules.get(name), "__spec__", None), "loader", None) is _FINDER:
                del sys.modules[name]
        _forget_what_transformers_saw()


def _other_flash_attn():
    """Where a flash_attn that is not ours comes from, or None."""
    if "flash_attn" in sys.modules:
        return "another flash_attn is imported"
    if spec := importlib.util.find_spec("flash_attn"):
        return f"flash_attn is found at {spec.origin or list(spec.submodule_search_locations)}"
    try:
        return f"flash-attn {importlib.metadata.version('flash-attn')} is installed"
    except importlib.metadata.PackageNotFoundError:
        return None


def _forget_what_transformers_saw():
    """transformers, if it is imported already, looks for flash-attn once and keeps the answers."""
    utils = sys.modules.get("transformers.utils.import_utils")
    for name in ("_package_distribution_mapping", "is_flash_attn_2_available", "is_flash_attn_3_available",
                 "is_flash_attn_4_available", "is_flash_attn_greater_or_equal"):
        if hasattr(found := getattr(utils, name, None), "cache_clear"):
            found.cache_clear()
    if mapping := getattr(utils, "PACKAGE_DISTRIBUTION_MAPPING", None):  # of transformers 5.17, made at its import
        mapping.clear()
        mapping.update(importlib.metadata.packages_distributions())
