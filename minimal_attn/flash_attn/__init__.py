"""The functions of flash-attn, by its names, its arguments and its layouts.

functions.py has attention, and kvcache.py attention to a cache. flash_attn_interface.py and bert_padding.py are two
modules of flash-attn by their own names, and install.py lets `import flash_attn` find them.
"""

from .functions import (flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_func,
                        flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func)
from .install import install_as_flash_attn, uninstall_as_flash_attn
from .kvcache import flash_attn_combine, flash_attn_with_kvcache, get_scheduler_metadata

__all__ = [
    "flash_attn_combine", "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache", "get_scheduler_metadata", "install_as_flash_attn", "uninstall_as_flash_attn",
]
