"""What `torch.cuda.cudart()` returns, without a GPU: registered memory, and the last error."""

import torch

_MESSAGES = {2: "out of memory", 712: "part or all of the requested memory range is mapped"}


class FakeCudart:
    """Memory registered by address. A failed call leaves its error, as CUDA does."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        """Registered bytes by address."""
        self.calls: list[str] = []
        self.refuses_with = 0
        """Error of every registration, or 0 if registrations succeed."""
        self.last_error = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls.append("register")
        if error := self.refuses_with or (712 if address in self.registered else 0):
            self.last_error = error
            return error
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unregister")
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return _MESSAGES[error]

    def synchronize(self, device: torch.device) -> None:
        self.calls.append("synchronize")

    def launch(self, size: int, *, device: str) -> torch.Tensor:
        """Run a kernel as torch does: an error of any earlier call is raised here, and cleared."""
        error = self.last_error
        self.last_error = 0
        if error:
            raise RuntimeError(f"CUDA error: {_MESSAGES[error]}")
        return torch.empty(size, device="meta")
