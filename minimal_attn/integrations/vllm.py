"""attention_backend="CUSTOM" for vLLM: its layers attend and write their caches by the functions of caches.py.

vLLM calls register in each of its processes, by the entry point of this package in `vllm.general_plugins`. A layer's
cache is one tensor (blocks, Hk, page_size, 2 D), which holds the key and the value of a token side by side. A step is
one packed batch: prompts, chunks of prompts, single tokens and drafts are samples of more or fewer rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import (AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder,
                                       AttentionType, MultipleOf)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ..caches import attention_with_kvcache, reshape_and_cache
from ..checks import NO_WINDOW


def register() -> None:
    """Make our attention known to vLLM, which then takes attention_backend="CUSTOM". A second call changes nothing."""
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.{Backend.__qualname__}")


class Backend(AttentionBackend):
    """Our attention as vLLM asks about it before a layer takes it. All that is not named here is refused."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return AttentionBackendEnum.CUSTOM.name

    @staticmethod
    def get_impl_cls() -> type[Attend]:
        return Attend

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[MultipleOf]:
        return [MultipleOf(16)]  # Hopper's kernels read no pages of other sizes

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size <= 256

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        return capability >= (8, 0)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_combination(cls, head_size, dtype, kv_cache_dtype, *others, **more) -> str | None:
        if kv_cache_dtype in (None, "auto", str(dtype).removeprefix("torch.")):
            return None
        return f"the caches must have the dtype of the model, which is {dtype}"


class Step(NamedTuple):
    """Where the rows of a step are, and which keys they see: the metadata of all layers that share pages."""

    query_start_loc: Tensor  # int32 (B + 1,), where each sample's rows begin
    max_query_len: int
    seq_lens: Tensor  # int32 (B,), how many keys a sample has, new ones included
    block_table: Tensor  # int32 (B, max_pages)


class Builder(AttentionMetadataBuilder[Step]):
    """Makes the Step of what vLLM says of a batch. Nothing is copied or read from the GPU."""

    # Kernels read all lengths on the GPU, and samples with more rows than max_query_len are served too. So one graph
    # serves every batch of its number of tokens: single tokens, drafts of several tokens, and prompts.
    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:  # abstract in vLLM
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata, fast_build: bool = False) -> Step:
        batch = common_attn_metadata
        if common_prefix_len:
            raise NotImplementedError("minimal_attn: cascade attention is not supported")
        if batch.causal is not True:
            raise NotImplementedError("minimal_attn: only causal layers are supported")
        return Step(batch.query_start_loc, batch.max_query_len, batch.seq_lens, batch.block_table_tensor)


class Attend(AttentionImpl[Step]):
    """The attention of a layer."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
                 alibi_slopes: list[float] | None = None, sliding_window: int | None = None,
                 kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
                 attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None,
                 sinks: Tensor | None = None) -> None:
        """sliding_window: how many keys a row sees, its own included."""
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"minimal_attn: attention of type {attn_type} is not supported, only that of "
                                      "decoders is")
        if kv_cache_dtype not in Backend.supported_kv_cache_dtypes:
            raise NotImplementedError(f"minimal_attn: caches in {kv_cache_dtype} are not supported")
        self.num_heads, self.num_kv_heads, self.head_size, self.scale = num_heads, num_kv_heads, head_size, float(scale)
        self.kv_cache_dtype, self.kv_sharing_target_layer_name = kv_cache_dtype, kv_sharing_target_layer_name
        self.options = dict(
            causal=True, sm_scale=float(scale), softcap=logits_soft_cap or 0, sinks=sinks,
            window_size=NO_WINDOW if sliding_window is None else (sliding_window - 1, 0),
            alibi_slopes=None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32))

    def forward(self, layer: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
                attn_metadata: Step | None, output: Tensor, output_scale: Tensor | None = None,
                output_block_scale: Tensor | None = None) -> Tensor:
        """Attention of the rows query (T, H, D) to the cache, which has their keys already, into output (T, H, D). Rows
        after the last sample are padding. attn_metadata is None in a run that measures memory."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("minimal_attn: a quantized output is not supported")
        if attn_metadata is None:
            return output.zero_()
        k, v = kv_cache.split(self.head_size, -1)
        out = attention_with_kvcache(
            query.transpose(0, 1)[None], k, v, attn_metadata.seq_lens, page_table=attn_metadata.block_table,
            cu_seqlens_q=attn_metadata.query_start_loc, max_seqlen_q=attn_metadata.max_query_len, **self.options)
        return output.copy_(out[0].transpose(0, 1))

    def do_kv_cache_update(self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor,
                           slot_mapping: Tensor) -> None:
        """Write key and value (T, Hk, D) to the slots of the cache; rows beyond slot_mapping are padding."""
        reshape_and_cache(key, value, *kv_cache.transpose(1, 2).split(self.head_size, -1), slot_mapping)
