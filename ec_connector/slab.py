"""The memory behind a pool: one allocation on the engine's device, registered whole."""

from __future__ import annotations

import math
import mmap

import torch
import xxhash

from ec_connector.transport.reads import HOST_DEVICE, PROBE_BYTES, Region

_DIGEST_BYTES = 256 << 10
"""Copied and then digested at a time: it stays in a core's cache between the two, and the calls cost little."""


class Slab:
    """`size_bytes` of memory on `device`. Offsets are the pool's.

    Content is digested with xxh3_64 on the host, whatever the device, so that peers on different devices agree.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        whole = size_bytes + PROBE_BYTES
        self._bytes = _host_memory(whole) if device.type == "cpu" else _device_memory(whole, device)
        # The same bytes without torch, whose slices cost more than digesting a small item.
        self._host = memoryview(self._bytes.numpy()) if device.type == "cpu" else None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._staging: torch.Tensor | None = None
        self.device = device
        self.probe_offset = size_bytes
        """Where `PROBE_BYTES` of the region lie that no extent uses."""

    @property
    def region(self) -> Region:
        device = HOST_DEVICE if self.device.type == "cpu" else self._bytes.device.index
        return Region(self._bytes.data_ptr(), self._bytes.numel(), device)

    def adopt_thread(self) -> None:
        """Make this thread able to move bytes to and from the slab: UCX needs the device's context to be current."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def view(self, offset: int, shape: tuple[int, int], dtype: str) -> torch.Tensor:
        """The tensor stored at `offset`, sharing the slab's memory. Shape (rows, width)."""
        element = element_type(dtype)
        size = math.prod(shape) * element.itemsize
        return self._bytes[offset : offset + size].view(element).view(shape)

    def write(self, offset: int, tensor: torch.Tensor) -> int | None:
        """Copy `tensor` (rows, width) to `offset`, in the order of the current stream.

        Returns the digest of what was written; None where a device is still writing.
        """
        rows, width = tensor.shape
        target, source = self.view(offset, (rows, width), dtype_name(tensor)), tensor.detach()
        if self._host is None:
            target.copy_(source)
            return None
        digest = xxhash.xxh3_64()
        row_bytes = width * tensor.element_size()
        step = max(1, _DIGEST_BYTES // row_bytes)
        for start in range(0, rows, step):
            end = min(start + step, rows)
            target[start:end].copy_(source[start:end])
            digest.update(self._host[offset + start * row_bytes : offset + end * row_bytes])
        return int(digest.intdigest())

    def digest(self, offset: int, size_bytes: int) -> int:
        """xxh3_64 over the bytes at `offset`. Nothing may be writing there."""
        if self._host is not None:
            return int(xxhash.xxh3_64_intdigest(self._host[offset : offset + size_bytes]))
        return int(xxhash.xxh3_64_intdigest(self._staged(offset, size_bytes).numpy()))

    def _staged(self, offset: int, size_bytes: int) -> torch.Tensor:
        """A copy in host memory."""
        assert self._stream is not None
        source = self._bytes[offset : offset + size_bytes]
        if self._staging is None or self._staging.numel() < size_bytes:
            self._staging = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        target = self._staging[:size_bytes]
        with torch.cuda.stream(self._stream):  # of its own, so as not to wait for the engine's compute
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()
        return target


def _host_memory(size_bytes: int) -> torch.Tensor:
    """Anonymous memory, in huge pages where there are any, and touched.

    The first touch of a page costs more than the copy into it (in a virtual machine tens of times more), and it
    would fall into a request. A network card's registration would pin all of it anyway.
    """
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def _device_memory(size_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def dtype_name(tensor: torch.Tensor) -> str:
    """torch.bfloat16 -> "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def element_type(name: str) -> torch.dtype:
    """The floating-point torch dtype of that name.

    Raises:
        ValueError: There is none.
    """
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in dtypes:
        raise ValueError(f"{name!r} is no element type of encoder outputs")
    return dtypes[name]
