"""vLLM's platform for CPUs, which takes our attention where an engine asks for it: vLLM's own one never does."""

from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability


class Cpu(CpuPlatform):
    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        if selected_backend is None or selected_backend.name != "CUSTOM":
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        import engine

        backend = selected_backend.get_class()
        reasons = backend.validate_configuration(device_capability=DeviceCapability(9, 0),
                                                 **attn_selector_config._asdict())
        if reasons:  # as on CUDA
            raise ValueError(f"{selected_backend} is not valid for this configuration: {reasons}")
        engine.watch(backend.get_impl_cls())
        return selected_backend.get_path()
