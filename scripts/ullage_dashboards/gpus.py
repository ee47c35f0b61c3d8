"""The dashboard of GPUs: what DCGM measures, and what engines ask the driver themselves."""

from ullage_dashboards.model import (
    ENGINES,
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


def gpu(measure: str, legend: str = "{{engine_pod}} {{gpu}}") -> Query:
    """Return a recorded series of every GPU of the chosen engines."""
    return Query(legend, f"ullage:{measure}{{{OF_GPUS}}}")


def grows(measure: str, legend: str) -> Query:
    """Return the growth of a recorded counter over ten minutes."""
    return Query(legend, f"sum(increase(ullage:{measure}{{{OF_GPUS}}}[10m]))")


def of_driver(name: str, by: str) -> Query:
    """Return a gauge that an engine reads from its driver."""
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
                    "Share of time in which a kernel ran. Under 10 % an engine is idle, above 90 % "
                    "its GPU is what bounds it.",
                    "percentunit",
                    [gpu("gpu_utilization:ratio")],
                    most=1,
                ),
                Panel(
                    "Multiprocessors, tensor cores, memory",
                    "Share of time in which each had work. Memory high and tensor cores low is "
                    "decoding; the other way round is prefill.",
                    "percentunit",
                    [
                        gpu("gpu_sm_active:ratio", "{{engine_pod}} {{gpu}} SM"),
                        gpu("gpu_tensor_active:ratio", "{{engine_pod}} {{gpu}} tensor"),
                        gpu("gpu_dram_active:ratio", "{{engine_pod}} {{gpu}} memory"),
                    ],
                    most=1,
                ),
                Panel(
                    "Memory",
                    "Share that is taken. Engines take their KV at the start, so it is constant.",
                    "percentunit",
                    [gpu("gpu_memory_used:ratio")],
                    lines=(0.8, 0.95),
                    most=1,
                ),
                Panel("Memory in bytes", "Taken.", "bytes", [gpu("gpu_memory_used:bytes")]),
                Panel(
                    "NVLink",
                    "Bytes a second, of all links.",
                    "Bps",
                    [gpu("nvlink:bytes_per_second")],
                ),
                Panel(
                    "PCIe",
                    "Bytes a second that the GPU sent and received: KV that moves to host memory "
                    "and back.",
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
                    "Of the GPU and of its memory.",
                    "celsius",
                    [
                        gpu("gpu_temperature:celsius"),
                        gpu("gpu_memory_temperature:celsius", "{{engine_pod}} {{gpu}} memory"),
                    ],
                    lines=(85, 95),
                ),
                Panel("Power", "What each GPU draws.", "watt", [gpu("gpu_power:watts")]),
                Panel(
                    "Clocks",
                    "Of multiprocessors and of memory. A GPU below its twins is throttled.",
                    "hertz",
                    [
                        gpu("gpu_sm_clock:hertz"),
                        gpu("gpu_memory_clock:hertz", "{{engine_pod}} {{gpu}} memory"),
                    ],
                ),
                Panel(
                    "Throttling",
                    "Times in five minutes that clocks were lowered, by reason.",
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
                    "The last error that the driver reported; some are of programs, others of the "
                    "hardware.",
                    "none",
                    [gpu("gpu_xid:last")],
                ),
                Panel(
                    "ECC",
                    "Errors of memory since the driver was loaded: corrected, and not.",
                    "none",
                    [
                        gpu("gpu_ecc_uncorrectable:total", "{{engine_pod}} {{gpu}} uncorrected"),
                        gpu("gpu_ecc_corrected:total", "{{engine_pod}} {{gpu}} corrected"),
                    ],
                ),
                Panel(
                    "Rows remapped",
                    "Rows of memory replaced for errors, and whether one could not be.",
                    "none",
                    [
                        gpu("gpu_remapped_rows:total"),
                        gpu("gpu_row_remap_failure:state", "{{engine_pod}} {{gpu}} failed"),
                    ],
                ),
                Panel(
                    "NVLink errors",
                    "In ten minutes: data sent again, links lost and recovered; and checksum "
                    "errors a second.",
                    "none",
                    [
                        grows("nvlink_replays:total", "replays"),
                        grows("nvlink_recoveries:total", "recoveries"),
                        Query("CRC a second", f"sum(ullage:nvlink_crc_errors:rate1m{{{OF_GPUS}}})"),
                    ],
                ),
                Panel(
                    "PCIe replays",
                    "Data sent again over PCIe in ten minutes.",
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
                    "Engines and reasons for which the driver slows their GPUs down.",
                    "none",
                    [of_driver("gpu_throttled", "pod, gpu, reason")],
                ),
                Panel(
                    "Boost off",
                    "1 while an engine runs smaller batches because its GPUs are throttled, and "
                    "1 while the driver does not answer it.",
                    "none",
                    [
                        gauge("ullage_engine_boost_off", "pod", ENGINES, how="max"),
                        gauge("ullage_gpu_driver_silent", where=ENGINES, how="max", needs=A_GPU),
                    ],
                ),
                Panel(
                    "Power under its limit",
                    "Share of the power that each GPU may draw; near 1 it is capped.",
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
                    "More than the engine's own: another process is on the device.",
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
                    "Links that are up: fewer than on its twins slow a group down.",
                    "none",
                    [of_driver("gpu_nvlinks_active", "pod, gpu")],
                ),
            ],
        ),
    ],
)
