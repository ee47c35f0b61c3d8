"""Allocate all of a device's memory except some bytes, and hold it until standard input ends.

This imitates another process on the GPU. `python -m benchmarks.gpu.ballast cuda 67108864` leaves
64 MiB free, and prints the bytes that it holds. On a CPU, it allocates little memory, so that a
rehearsal also has this process.
"""

import sys

import torch

ON_CPU_BYTES = 64 << 20
STEP_BYTES = 16 << 20
"""Free bytes that count as allocated, because an allocation may be rounded up."""


def main() -> None:
    device = torch.device(sys.argv[1])
    leave = int(sys.argv[2])
    held = take(device, leave)
    print(sum(each.nbytes for each in held), flush=True)
    sys.stdin.read()


def take(device: torch.device, leave: int) -> list[torch.Tensor]:
    """Allocate tensors that leave about `leave` bytes of the device free."""
    if device.type == "cpu":
        return [torch.zeros(ON_CPU_BYTES, dtype=torch.uint8)]
    held = []
    while (spare := torch.cuda.mem_get_info(device)[0] - leave) > STEP_BYTES:
        try:
            held.append(torch.empty(spare - STEP_BYTES // 2, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            # Free memory is fragmented: half of it may fit one range.
            held.append(torch.empty(spare // 2, dtype=torch.uint8, device=device))
    return held


if __name__ == "__main__":
    main()
