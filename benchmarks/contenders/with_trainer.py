"""The job with the Trainer of Hugging Face transformers, which owns the loop."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks.cases import Case
from benchmarks.contenders.common import LOG_EVERY, Contender, seeded_module
from benchmarks.contenders.loop_thread import LoopThread
from rung.distributed.world import World
from rung.spec.task import Task

_ENDLESS = 10**9  # steps


def _arguments(case: Case, folder: str, tuned: bool) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": _ENDLESS,
        "per_device_train_batch_size": case.rank_batch_size,
        "max_grad_norm": case.clip or 0.0,
        "lr_scheduler_type": "constant",
        "bf16": case.precision == "bf16",
        "torch_compile": case.compile,
        "use_cpu": case.device == "cpu",
        "seed": case.seed,
        "dataloader_drop_last": True,
        "dataloader_pin_memory": case.device == "cuda",
        "dataloader_num_workers": case.workers,
        "dataloader_persistent_workers": case.workers > 0,
        # No other contender shows progress or saves.
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
        "logging_steps": LOG_EVERY,
    }
    if tuned:
        settings |= {
            "logging_strategy": "no",
            "logging_nan_inf_filter": False,  # looks at the loss on the host in every step
            "ddp_find_unused_parameters": False,  # on by default for a model that is not one of transformers' own
            "remove_unused_columns": False,  # looks at each sample for columns
            "accelerator_config": {"non_blocking": case.device == "cuda"},
        }
    # With torch_compile it turns TF32 on for the whole process, where the others run, too.
    precision = torch.backends.fp32_precision
    arguments = TrainingArguments(**settings)
    torch.backends.fp32_precision = precision
    if arguments.n_gpu > 1:
        raise RuntimeError(f"Trainer would use DataParallel on {arguments.n_gpu} GPUs: set CUDA_VISIBLE_DEVICES to one")
    return arguments


class _Trainer(Trainer):
    """With the task's loss. The last step's is kept on the device for the callback that reads it."""

    def __init__(self, module: nn.Module, task: Task, arguments: TrainingArguments, *, loss_inside: bool) -> None:
        self._loss = None if loss_inside else task.loss
        self.last_loss: Tensor | None = None
        super().__init__(
            module,
            arguments,
            data_collator=_named,
            train_dataset=task.train_data(),
            optimizers=(task.optimizer(module), None),
        )
        self.remove_callback(PrinterCallback)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if self._loss is None:
            loss = model(inputs["inputs"], inputs["labels"])
        else:
            loss = self._loss(model(inputs["inputs"]), inputs["labels"])
        self.last_loss = loss.detach()
        return loss


def _named(samples: Any) -> dict[str, Tensor]:
    """Trainer takes batches as dicts."""
    inputs, targets = default_collate(samples)
    return {"inputs": inputs, "labels": targets}


class _LossFromLog(TrainerCallback):
    """As documented: Trainer logs the mean loss of LOG_EVERY steps over all ranks."""

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self._loop.after_steps(logs["loss"])


class _LossFromStep(TrainerCallback):
    """Tuned: without Trainer's log, which also reads the norm and keeps a history."""

    def __init__(self, loop: LoopThread, trainer: _Trainer) -> None:
        self._loop, self._trainer = loop, trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % LOG_EVERY == 0:
            self._loop.after_steps(self._trainer.last_loss.item())


def build(case: Case, world: World, *, tuned: bool = False) -> Contender:
    """The process group is there already; Trainer finds it, through Accelerate, and uses it."""
    task = case.load_task()
    module: nn.Module = seeded_module(case, task) if tuned else seeded_module(case, task).model
    with tempfile.TemporaryDirectory() as folder:  # which it makes, and never writes to
        trainer = _Trainer(module, task, _arguments(case, folder, tuned), loss_inside=tuned)
    loop = LoopThread(world.device)
    trainer.add_callback(_LossFromStep(loop, trainer) if tuned else _LossFromLog(loop))
    loop.start(trainer.train)
    return loop
