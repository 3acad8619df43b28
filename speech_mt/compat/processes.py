"""Several processes on CPUs, started by torchrun as on GPUs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from speech_mt.errors import InputError


def call_main_counts_gpus() -> bool:
    from fairseq.distributed import utils

    return utils.call_main.__module__ == utils.__name__


def launch_from_torchrun() -> None:
    from fairseq.distributed import utils

    stock = utils.call_main

    def call_main(cfg: Any, main: Any, **kwargs: Any) -> None:
        shares_work = (
            Path(main.__code__.co_filename).stem == "train"
        )  # other commands do it all in each process
        if shares_work:
            configure(cfg.distributed_training, on_cpu=cfg.common.cpu or not torch.cuda.is_available())
        stock(cfg, main, **kwargs)

    utils.call_main = call_main


def configure(cfg: Any, on_cpu: bool) -> None:
    """Read rank and world size from torchrun; on CPUs, talk by gloo and spawn nothing.

    Args:
        cfg: fairseq's ``distributed_training`` options, changed in place.

    Raises:
        InputError: several processes on CPUs were asked for, but nothing has started them.
    """
    processes = int(os.environ.get("WORLD_SIZE", 1))
    by_torchrun = processes > 1 and {"RANK", "MASTER_ADDR"} <= os.environ.keys()
    if cfg.distributed_init_method is None and by_torchrun:
        cfg.distributed_init_method = "env://"
        cfg.distributed_world_size = processes
        cfg.distributed_rank = int(os.environ["RANK"])
        cfg.device_id = 0 if on_cpu else int(os.environ.get("LOCAL_RANK", 0))
        cfg.distributed_no_spawn = True
    if not on_cpu:
        return
    if cfg.distributed_init_method is not None:  # one process for each GPU there is would be none
        cfg.distributed_no_spawn = True
        cfg.distributed_backend = "gloo"
    elif cfg.distributed_world_size > 1:
        raise InputError(
            f"--distributed-world-size {cfg.distributed_world_size} without a GPU for each: on CPUs leave it "
            f"out and run torchrun --nproc_per_node={cfg.distributed_world_size} {sys.argv[0]} ..."
        )


def hydra_trains_alone() -> bool:
    """fairseq-hydra-train imports user_dir after it has decided to be a single process."""
    return (
        "fairseq_cli.hydra_train" in sys.modules
        and int(os.environ.get("WORLD_SIZE", 1)) > 1
        and not torch.distributed.is_initialized()
    )


def refuse_to_train_alone() -> None:
    processes = os.environ["WORLD_SIZE"]
    options = [f"distributed_world_size={processes}"]
    if not torch.cuda.is_available():
        options += ["distributed_init_method=env://", "distributed_no_spawn=true", "distributed_backend=gloo"]
        options += ["device_id=0", r"distributed_rank=\${oc.env:RANK}"]
    arguments = " ".join(f"distributed_training.{option}" for option in options)
    raise InputError(f"torchrun started {processes} processes, but each would train alone; add {arguments}")


def ddp_wants_devices() -> bool:
    from fairseq.models import distributed_fairseq_model

    return distributed_fairseq_model.DistributedDataParallel is DistributedDataParallel


def ddp_on_cpu() -> None:
    from fairseq.models import distributed_fairseq_model

    def distributed(
        module: torch.nn.Module, device_ids: Any = None, output_device: Any = None, **kwargs: Any
    ) -> DistributedDataParallel:
        if not any(parameter.is_cuda for parameter in module.parameters()):
            device_ids = output_device = None
        return DistributedDataParallel(module, device_ids=device_ids, output_device=output_device, **kwargs)

    distributed_fairseq_model.DistributedDataParallel = distributed


def gathers_on_gpu() -> bool:
    from fairseq.distributed import utils

    return utils.all_gather_list.__module__ == utils.__name__


def gather_on_cpu() -> None:
    from fairseq import utils as fairseq_utils
    from fairseq.distributed import utils

    stock = utils.all_gather_list

    def all_gather_list(data: Any, group: Any = None, max_size: int = 16384) -> list[Any]:
        group = utils.get_global_group() if group is None else group
        if torch.distributed.get_backend(group) != "gloo":
            return stock(data, group, max_size)
        gathered: list[Any] = [None] * utils.get_world_size(group)
        torch.distributed.all_gather_object(gathered, fairseq_utils.move_to_cpu(data), group=group)
        return gathered

    utils.all_gather_list = all_gather_list
