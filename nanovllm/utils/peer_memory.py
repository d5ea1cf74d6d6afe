"""Memory on one GPU that the processes of other GPUs can write, through CUDA's inter-process handles.

`utils/dist.py` makes one per rank for the inboxes of the all-reduce kernel. The calls go to the driver's own API: torch
has no public way to share memory between processes that use different GPUs, and a library of that name is there
wherever CUDA is.
"""

import ctypes
from functools import cache

import torch

_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * _HANDLE_BYTES)]


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: object) -> None:
    code = getattr(_driver(), name)(*args)
    if code:
        raise RuntimeError(f"{name} failed with CUDA error {code}")


class PeerMemory:
    """This rank's own buffer, and the addresses of all ranks' buffers. Raises RuntimeError or OSError for trouble."""

    HANDLE_BYTES = _HANDLE_BYTES

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate the buffer and fill it with 0xFF."""
        self.device = device
        self._opened: list[int] = []
        address = ctypes.c_uint64()
        self._make_current()
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self._own: int | None = address.value
        _call("cuMemsetD8_v2", address, ctypes.c_ubyte(0xFF), ctypes.c_size_t(num_bytes))
        torch.cuda.synchronize(device)
        handle = _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        self.handle = bytes(handle)  # for the other ranks

    def open(self, handles: list[bytes], rank: int) -> list[int]:
        """Address in this process of every rank's buffer, this one's included; `handles` in rank order."""
        self._make_current()
        addresses = []
        for peer, data in enumerate(handles):
            if peer == rank:
                addresses.append(self._own)
                continue
            address, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(data)
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_ENABLE_PEER_ACCESS))
            self._opened.append(address.value)
            addresses.append(address.value)
        return addresses

    def close(self) -> None:
        """Give it all back; may be called twice. Nothing may run that uses it."""
        self._make_current()
        while self._opened:
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(self._opened.pop()))
        if self._own is not None:
            _call("cuMemFree_v2", ctypes.c_uint64(self._own))
            self._own = None

    def _make_current(self) -> None:
        """The driver works on the thread's current context, which torch sets when it has work for a device."""
        torch.cuda.set_device(self.device)
        torch.cuda.synchronize(self.device)
