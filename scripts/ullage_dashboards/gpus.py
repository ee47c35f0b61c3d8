"""The dashboard for GPUs, with metrics from DCGM and figures that engines read from the driver."""

from ullage_dashboards.model import (
    ENGINES,
    INTERVAL,
    LLMSERVICE,
    NAMESPACE,
    Dashboard,
    Panel,
    Query,
    Row,
    Variable,
    gauge,
    rate,
)

A_GPU = "a GPU"
OF_GPUS = 'engine_pod=~"$pod"'

SM_ACTIVE = f"ullage:gpu_sm_active:ratio{{{OF_GPUS}}}"
POWER = f"sum by (engine_pod) (ullage:gpu_power:watts{{{OF_GPUS}}})"
TOKENS = (
    f"sum by (engine_pod) (label_replace(rate(ullage_generation_tokens_total{{{ENGINES}}}"
    f'[{INTERVAL}]), "engine_pod", "$1", "pod", "(.+)"))'
)
"""PromQL for an engine's generated tokens a second, with the exporter's name for its pod."""


def gpu(measure: str, legend: str = "{{engine_pod}} {{gpu}}") -> Query:
    """Return the query for a recorded series of all GPUs of the chosen engines."""
    return Query(legend, f"ullage:{measure}{{{OF_GPUS}}}")


def grows(measure: str, legend: str) -> Query:
    """Return the query for a recorded counter's growth over ten minutes."""
    return Query(legend, f"sum(increase(ullage:{measure}{{{OF_GPUS}}}[10m]))")


def of_driver(name: str, by: str) -> Query:
    """Return the query for a gauge that engines read from the GPU driver."""
    return gauge(f"ullage_{name}", by, ENGINES, needs=A_GPU)


GPU = Dashboard(
    "ullage-gpu",
    "Ullage / GPU",
    "What NVIDIA's DCGM exporter measures of engines' GPUs, by recording rules that read its old "
    "and new names, and what engines ask the driver themselves.",
    [
        NAMESPACE,
        LLMSERVICE,
        Variable("pod", "Engine", "label_values(ullage:gpu_temperature:celsius, engine_pod)"),
    ],
    [
        Row(
            "Use",
            [
                Panel(
                    "Utilisation",
                    "Share of time in which a kernel ran. Below 10 % the engine is idle. Above 90 "
                    "% the GPU is the bottleneck.",
                    "percentunit",
                    [gpu("gpu_utilization:ratio")],
                    most=1,
                ),
                Panel(
                    "Multiprocessors, tensor cores, memory",
                    "Share of time in which SMs, tensor cores and memory were active. Decoding has "
                    "active memory and idle tensor cores. Prefill is the reverse.",
                    "percentunit",
                    [
                        gpu("gpu_sm_active:ratio", "{{engine_pod}} {{gpu}} SM"),
                        gpu("gpu_tensor_active:ratio", "{{engine_pod}} {{gpu}} tensor"),
                        gpu("gpu_dram_active:ratio", "{{engine_pod}} {{gpu}} memory"),
                    ],
                    most=1,
                ),
                Panel(
                    "Most and least busy GPU of an engine",
                    "Difference in the share of time in which SMs were active. A rank or stage "
                    "with more work makes the others wait.",
                    "percentunit",
                    [
                        Query(
                            "{{engine_pod}}",
                            f"max by (engine_pod) ({SM_ACTIVE}) - min by (engine_pod) "
                            f"({SM_ACTIVE})",
                        )
                    ],
                    lines=(0.3,),
                    most=1,
                ),
                Panel(
                    "Memory",
                    "Share of memory in use. Engines take their KV at the start, so it is "
                    "constant.",
                    "percentunit",
                    [gpu("gpu_memory_used:ratio")],
                    lines=(0.8, 0.95),
                    most=1,
                ),
                Panel("Memory in bytes", "Memory in use.", "bytes", [gpu("gpu_memory_used:bytes")]),
                Panel(
                    "NVLink",
                    "Bytes a second over all links.",
                    "Bps",
                    [gpu("nvlink:bytes_per_second")],
                ),
                Panel(
                    "PCIe",
                    "Bytes a second that the GPU sent and received, for example for KV swapped to "
                    "host memory.",
                    "Bps",
                    [
                        gpu("pcie_sent:bytes_per_second", "{{engine_pod}} {{gpu}} sent"),
                        gpu("pcie_received:bytes_per_second", "{{engine_pod}} {{gpu}} received"),
                    ],
                ),
            ],
        ),
        Row(
            "Heat, power, clocks",
            [
                Panel(
                    "Temperature",
                    "Temperature of the GPU and of its memory.",
                    "celsius",
                    [
                        gpu("gpu_temperature:celsius"),
                        gpu("gpu_memory_temperature:celsius", "{{engine_pod}} {{gpu}} memory"),
                    ],
                    lines=(85, 95),
                ),
                Panel(
                    "Power",
                    "Power draw of each GPU, and the limit that its driver enforces.",
                    "watt",
                    [
                        gpu("gpu_power:watts"),
                        gpu("gpu_power_limit:watts", "{{engine_pod}} {{gpu}} limit"),
                    ],
                ),
                Panel(
                    "Energy of a token",
                    "Power of an engine's GPUs divided by the tokens that it generates a second. "
                    "It falls with larger batches. The power of idle GPUs counts.",
                    "joule",
                    [Query("{{engine_pod}}", f"{POWER} / on (engine_pod) ({TOKENS} > 0)")],
                ),
                Panel(
                    "Clocks",
                    "Clocks of SMs and of memory. A GPU with lower clocks than its peers is "
                    "throttled.",
                    "hertz",
                    [
                        gpu("gpu_sm_clock:hertz"),
                        gpu("gpu_memory_clock:hertz", "{{engine_pod}} {{gpu}} memory"),
                    ],
                ),
                Panel(
                    "Throttling",
                    "Number of throttle events in five minutes, by reason.",
                    "none",
                    [
                        Query(
                            "{{engine_pod}} {{clock_event}}",
                            "sum by (engine_pod, clock_event) "
                            f"(ullage:gpu_throttles:count5m{{{OF_GPUS}}})",
                        )
                    ],
                ),
            ],
        ),
        Row(
            "Errors",
            [
                Panel(
                    "Xid",
                    "The last error that the driver reported. Some come from programs, others from "
                    "the hardware.",
                    "none",
                    [gpu("gpu_xid:last")],
                ),
                Panel(
                    "ECC",
                    "Corrected and uncorrected memory errors since the driver was loaded.",
                    "none",
                    [
                        gpu("gpu_ecc_uncorrectable:total", "{{engine_pod}} {{gpu}} uncorrected"),
                        gpu("gpu_ecc_corrected:total", "{{engine_pod}} {{gpu}} corrected"),
                    ],
                ),
                Panel(
                    "Rows remapped",
                    "Memory rows remapped because of errors, and whether a remapping failed.",
                    "none",
                    [
                        gpu("gpu_remapped_rows:total"),
                        gpu("gpu_row_remap_failure:state", "{{engine_pod}} {{gpu}} failed"),
                    ],
                ),
                Panel(
                    "NVLink errors",
                    "Replays and link recoveries in ten minutes, and CRC errors a second.",
                    "none",
                    [
                        grows("nvlink_replays:total", "replays"),
                        grows("nvlink_recoveries:total", "recoveries"),
                        Query("CRC a second", f"sum(ullage:nvlink_crc_errors:rate1m{{{OF_GPUS}}})"),
                    ],
                ),
                Panel(
                    "PCIe replays",
                    "Replays over PCIe in ten minutes.",
                    "none",
                    [grows("pcie_replays:total", "replays")],
                ),
            ],
        ),
        Row(
            "As engines see their GPUs (NVML)",
            [
                Panel(
                    "Throttled",
                    "Engines whose GPUs the driver throttles, and the reasons.",
                    "none",
                    [of_driver("gpu_throttled", "pod, gpu, reason")],
                ),
                Panel(
                    "Boost off",
                    "1 while an engine runs smaller batches because its GPUs are throttled, and 1 "
                    "while the driver does not answer.",
                    "none",
                    [
                        gauge("ullage_engine_boost_off", "pod", ENGINES, how="max"),
                        gauge("ullage_gpu_driver_silent", where=ENGINES, how="max", needs=A_GPU),
                    ],
                ),
                Panel(
                    "Power under its limit",
                    "Share of the power limit that each GPU draws. Near 1 it is power-capped.",
                    "percentunit",
                    [
                        Query(
                            "{{pod}} {{gpu}}",
                            "sum by (pod, gpu) (ullage_gpu_power_watts"
                            f"{{{ENGINES}}} / ullage_gpu_power_limit_watts{{{ENGINES}}})",
                            needs=A_GPU,
                        )
                    ],
                    most=1,
                ),
                Panel(
                    "Memory that all processes use",
                    "If this is more than the engine's own memory, another process uses the "
                    "device.",
                    "bytes",
                    [of_driver("gpu_memory_used_bytes", "pod, gpu")],
                ),
                Panel(
                    "Xid by number",
                    "Errors a second that the driver reported since the engine started.",
                    "none",
                    [rate("ullage_gpu_xid_errors_total", "pod, gpu, xid", ENGINES, A_GPU)],
                ),
                Panel(
                    "NVLinks",
                    "Active links. Fewer links than on its peers slow a group down.",
                    "none",
                    [of_driver("gpu_nvlinks_active", "pod, gpu")],
                ),
            ],
        ),
    ],
)
