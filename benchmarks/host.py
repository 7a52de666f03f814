"""The kernel's host build behind the plugin library's Python face: what runs on a GPU, tried without one."""

import ctypes
from contextlib import AbstractContextManager, nullcontext

from moetrt.library import Device, MoEFinalizeParams, PluginLibrary
from tests.plugins.host.host_build import build_library
from tests.plugins.host.host_kernel import TACTICS, WHOLE_CHIP


class HostLibrary(PluginLibrary):
    """Its "device" is the process's memory, and it has no stream."""

    def errors_kept(self) -> AbstractContextManager[None]:
        return nullcontext()

    def current_device(self) -> Device:
        return Device(compute_capability=90, multiprocessors=132)

    def tactics(self, params: MoEFinalizeParams, device: Device) -> dict[int, str]:
        found = (ctypes.c_int32 * len(TACTICS))()
        count = self.functions.moetrt_host_tactics(ctypes.byref(params), ctypes.byref(device), found)
        return {tactic: TACTICS[tactic] for tactic in found[:count]}


def host_library() -> HostLibrary:
    """Builds it, unless it is built already, and loads it."""
    path = build_library()
    functions = ctypes.CDLL(str(path))
    functions.moetrt_last_error.restype = ctypes.c_char_p
    params = ctypes.POINTER(MoEFinalizeParams)
    functions.moetrt_moe_finalize_with_tactic.argtypes = (params, ctypes.c_int32, ctypes.c_void_p)
    # The library is one for the whole process, and so is its current device.
    functions.moetrt_host_set_device(WHOLE_CHIP)
    return HostLibrary(path, functions)
