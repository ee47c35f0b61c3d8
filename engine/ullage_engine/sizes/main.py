"""The process behind `ullage serve` and `ullage models`: reads a request, and prints sizes.

The command never imports the engine, so it passes a `SizesRequest` as JSON on standard input and
reads a `SizesReport` from standard output.
"""

import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import torch

from ullage_common.model_sizes import (
    GpuMemory,
    MachineFacts,
    SizesReport,
    SizesRequest,
    SourceSizes,
)
from ullage_engine.model_config.dtypes import cpu_computes_bfloat16
from ullage_engine.model_config.hf_config import read_json
from ullage_engine.model_loader.prepare import open_checkpoint
from ullage_engine.model_loader.source import (
    CONFIG,
    bucket_and_key,
    hub_repository,
    is_of_bucket,
    resolve_source,
)
from ullage_engine.native.library import instruction_set
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.sizes.catalogue import CatalogueModel, catalogue
from ullage_engine.sizes.estimate import ConfigReader, UnsizedError, model_sizes

log = logging.getLogger("ullage.engine.sizes")

_WEIGHT_FILES = ".safetensors"


def main() -> int:
    """Answer the request on standard input, and return the exit status."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=SizesRequest)
    machine = machine_facts(request)
    # A choice of ranks is for as many GPUs as there are.
    counts = tuple(each for each in request.tensors if each <= max(1, len(machine.gpus)))
    tensors = counts if len(request.tensors) > 1 else request.tensors
    request = msgspec.structs.replace(request, device=machine.device, tensors=tensors)

    models = [source_sizes(source, request) for source in request.sources]
    if request.has_catalogue:
        models += [catalogue_sizes(model, request) for model in catalogue()]

    report = SizesReport(machine=machine, models=tuple(models))
    sys.stdout.buffer.write(msgspec.json.encode(report))
    return 0


def machine_facts(request: SizesRequest) -> MachineFacts:
    """Return what this machine has. A GPU is the device unless the request names another one."""
    has_cuda = torch.cuda.is_available() and request.device != "cpu"
    device = request.device
    if device == "auto":
        device = "cuda" if has_cuda else "cpu"

    return MachineFacts(
        device=device,
        gpus=tuple(_gpu(index) for index in range(torch.cuda.device_count() if has_cuda else 0)),
        has_bfloat16=device == "cuda" or cpu_computes_bfloat16(),
        instruction_set=instruction_set(),
        has_vllm=find_spec("vllm") is not None,
    )


def _gpu(index: int) -> GpuMemory:
    free, total = torch.cuda.mem_get_info(index)
    name = torch.cuda.get_device_name(index)
    return GpuMemory(name=name, total_bytes=int(total), free_bytes=int(free))


def catalogue_sizes(model: CatalogueModel, request: SizesRequest) -> SourceSizes:
    """Return the sizes of a well-known model."""
    try:
        reader = ConfigReader(Path(model.name, CONFIG), dict(model.config))
        sizes = model_sizes(Path(model.name), reader, request)
    except WeightsError as error:
        return SourceSizes(source=model.source, name=model.name, error=str(error))
    return SourceSizes(source=model.source, name=model.name, sizes=sizes)


def source_sizes(source: str, request: SizesRequest) -> SourceSizes:
    """Return the sizes of a source. Of a hub or bucket, only the configuration is fetched."""
    name = source_name(source)
    file_bytes = None
    is_missing = True
    try:
        if is_of_bucket(source) and not source.endswith(".gguf"):
            folder = _bucket_config(source)
            is_missing = False
            reader = ConfigReader(folder / CONFIG, read_json(folder / CONFIG))
            sizes = model_sizes(folder, reader, request)
        elif source.startswith("hf://"):
            path, file_bytes = _hub_config(source)
            is_missing = False
            sizes = model_sizes(path.parent, ConfigReader(path, read_json(path)), request)
        else:
            files = resolve_source(source)
            is_missing = False
            sizes = model_sizes(files.path, open_checkpoint(files), request)
    except WeightsError as error:
        return SourceSizes(
            source=source,
            name=name,
            error=str(error),
            is_missing=is_missing,
            is_unsized=isinstance(error, UnsizedError),
            file_bytes=file_bytes,
        )
    return SourceSizes(source=source, name=name, sizes=sizes, file_bytes=file_bytes)


def source_name(source: str) -> str:
    """Return a short name for a source: its repository, folder or file."""
    parts = urlsplit(source)
    if parts.scheme == "hf":
        return f"{parts.netloc}{parts.path}"
    return Path(parts.path).name


def _bucket_config(source: str) -> Path:
    from ullage_engine.model_loader.s3 import Wanted, fetch

    what = f"model.source {source!r}"
    return fetch(what, *bucket_and_key(what, source), Wanted((CONFIG,), CONFIG))


def _hub_config(source: str) -> tuple[Path, int | None]:
    """Fetch a repository's config.json, and return its path and the size of the weight files.

    Raises:
        WeightsError: the hub cannot be reached, or does not have the model.
    """
    repository, revision = hub_repository(source)
    try:
        from huggingface_hub import HfApi, hf_hub_download
    except ImportError as error:
        raise WeightsError(
            f"model.source {source!r}: hf:// needs the huggingface_hub package; "
            "pip install huggingface_hub, or name a folder"
        ) from error

    try:
        path = hf_hub_download(repository, CONFIG, revision=revision or None)
    except Exception as error:  # connection errors come from the client's HTTP library
        reason = " ".join(str(error).split())
        raise WeightsError(
            f"model.source {source!r}: the hub does not give its {CONFIG}: {reason}; check the "
            "name, the revision, HF_TOKEN for a gated model, and the network"
        ) from error

    try:
        info = HfApi().model_info(repository, revision=revision or None, files_metadata=True)
    except Exception:
        log.debug("the hub does not list %s", repository, exc_info=True)
        return Path(path), None  # the configuration is in the cache, and the hub is away
    names = (each for each in info.siblings or () if "/" not in each.rfilename)
    total = sum(each.size or 0 for each in names if each.rfilename.endswith(_WEIGHT_FILES))
    return Path(path), total or None


if __name__ == "__main__":
    sys.exit(main())
