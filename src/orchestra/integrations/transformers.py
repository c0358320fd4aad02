"""Distribute the training of a Trainer of Hugging Face Transformers, before `trainer.train()`:
`trainer = distribute(trainer, "LocalSGD(8)")`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from orchestra.engines.processes import distribute as own_loops
from orchestra.engines.processes.environment import detect, rank, world_size
from orchestra.errors import InputError
from orchestra.strategies.base import Strategy
from orchestra.strategies.registry import strategy_of_script
from orchestra.trainer.own_loop import Batches

try:
    from accelerate import skip_first_batches
    from accelerate.data_loader import SeedableRandomSampler
    from accelerate.state import DistributedType, PartialState
    from transformers import Trainer
    from transformers import trainer as trainer_module
except ImportError as error:
    raise InputError(
        f"orchestra.integrations.transformers needs Transformers and Accelerate ({error}): "
        "pip install '.[transformers]' in a clone of Orchestra"
    ) from None

T = TypeVar("T", bound=Trainer)

STATE_NAME = "orchestra.pt"
"""A file in a checkpoint's folder: the value of `batches.state_dict()`."""


def distribute(
    trainer: T,
    strategy: Strategy | str,
    *,
    bucket_megabytes: float = 25.0,
    overlap: bool = True,
    patience: float = 60.0,
    host: str | None = None,
) -> T:
    """Train with `trainer` under `strategy`, on all processes that torchrun or another launcher
    started.

    This takes the place of DistributedDataParallel and uses the same batches:
    `per_device_train_batch_size` is that of one worker, and the samplers are the Trainer's. Each
    worker evaluates on all samples with the agreed parameters, and all use the first worker's
    metrics. Checkpoints hold the agreed parameters and all that is needed to resume. A dedicated
    server never returns from `trainer.train()`: its process ends there with status 0 when the
    workers' scripts end.

    Args:
        trainer: of this class or a subclass; not yet training.
        strategy: an object such as `AllReduce("ring")`, or its notation as text.
        bucket_megabytes: as in `orchestra.distribute`, like `overlap`, `patience` and `host`.

    Returns:
        `trainer`, whose class is now a subclass of what it was.

    Raises:
        InputError: the Trainer distributes the training itself in a way that would collide.
    """
    strategy = strategy_of_script(strategy)
    if not isinstance(trainer, Trainer):
        raise InputError(f"distribute: expected a Trainer, got {type(trainer).__name__}")
    _refuse_collisions(trainer, strategy)
    # Our methods go in front of the object's own class, so that a subclass keeps what it overrides.
    if not isinstance(trainer, _Distributed):
        kind = type(trainer)
        trainer.__class__ = type(kind.__name__, (_Distributed, kind), {})
    assert isinstance(trainer, _Distributed)
    # Servers are none of the Trainer's processes
    workers = len(strategy.roles(world_size()).workers)
    options: dict[str, Any] = {"bucket_megabytes": bucket_megabytes, "overlap": overlap}
    options |= {"patience": patience, "host": host}
    trainer.distribution = _Distribution(strategy, workers, options)
    trainer.take_place()
    return trainer


def _refuse_collisions(trainer: Trainer, strategy: Strategy) -> None:
    args = trainer.args
    refused = {
        "deepspeed": bool(args.deepspeed),
        "fsdp": bool(args.fsdp),
        "parallelism_config": args.parallelism_config is not None,
        "accelerator_config.split_batches": bool(args.accelerator_config.split_batches),
        "auto_find_batch_size": bool(args.auto_find_batch_size),
        "save_on_each_node": bool(args.save_on_each_node),
    }
    for name, given in refused.items():
        if given:
            raise InputError(f"TrainingArguments: {name} does not go with Orchestra: leave it out")
    # The Trainer would wrap the model in DataParallel
    if args.n_gpu > 1:
        raise InputError(
            f"this process would use {args.n_gpu} GPUs: start one process for each, with torchrun"
        )
    # The scale follows the gradients that a worker sees; under all-reduce all see the average
    if trainer.accelerator.scaler is not None and not strategy.traits().lockstep:
        raise InputError(
            f"TrainingArguments: with fp16 every worker would scale its loss, and skip steps, by "
            f"itself under {strategy!r}: set bf16, or take AllReduce"
        )


@dataclass
class _Distribution:
    """The distribution of a Trainer; `loader` is set once training has begun."""

    strategy: Strategy
    workers: int
    options: dict[str, Any]
    loader: _Loader | None = None
    tokens: int = 0  # of all workers, as far as they have been summed


@dataclass
class _WorkerState:
    """This process's place among the workers, for the Trainer; Accelerate sees one process."""

    num_processes: int
    process_index: int = field(default_factory=rank)
    local_process_index: int = 0
    distributed_type: DistributedType = DistributedType.NO

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as Accelerate's own state, so that reading the arguments needs no Orchestra."""
        return PartialState, ()


class _Loader:
    """The loader that Accelerate prepared for one process; distributed once it has `batches`.

    Attributes:
        whole: the loader of all samples, which is distributed.
        batches: the batches of this worker, which are iterated from then on.
        skipped: the batches that the next epoch leaves out at its beginning.
    """

    def __init__(self, prepared: Any, workers: int, group: int) -> None:
        # Below Accelerate's wrapper, which moves batches and seeds its sampler by epoch
        self.whole: DataLoader[Any] = prepared.base_dataloader
        self._prepared, self._workers, self._group = prepared, workers, group
        self.batches: Batches | None = None
        self._groups: Iterator[list[Any]] | None = None
        self._given = self.skipped = 0
        sampler = getattr(self.whole.batch_sampler, "sampler", None)
        if isinstance(sampler, SeedableRandomSampler) and sampler.generator is None:
            sampler.generator = torch.Generator()  # which it would make, and seed, in an epoch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prepared, name)

    def __len__(self) -> int:
        # Rounded up: where batches do not come out even, some are repeated
        return -(-len(self.whole) // self._workers)

    def __iter__(self) -> Iterator[Any]:
        if self.batches is None:
            yield from self._prepared
            return
        self._given, self.skipped = self.skipped, 0
        if self.batches.taken != self._given and not self.batches.ended:  # not resumed there
            self.batches.start_at(self._given)
        self._groups = groups = self.batches.groups(self._group)
        for group in groups:
            self._given += len(group)
            yield from group
        self.batches.serve_to_the_end()  # a rank that has become a server

    @property
    def exhausted(self) -> bool:
        """True if the Trainer has had all batches of its epoch and their number is known."""
        try:
            return self._given == len(self)
        except TypeError:
            return False

    def leave(self, *, ends_epoch: bool) -> None:
        """Leave the epoch after its last step, or after the last step of the training. Every
        worker's model then holds the agreed parameters.

        The Trainer asks for as many batches as it counted, and never finds that there are no
        more. After a `Switch` to fewer workers each may have more batches, which are left out.
        """
        if self._groups is None:
            return
        assert self.batches is not None
        self._groups.close()  # type: ignore[attr-defined]  # a generator
        self._groups = None
        if ends_epoch:
            self.batches.end_epoch()
        else:
            self.batches.agree()


def _skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """Return the loader from batch `num_batches` on. The Trainer calls this to resume in the
    middle of an epoch, and would otherwise make a new loader.
    """
    if not isinstance(loader, _Loader):
        return skip_first_batches(loader, num_batches)
    loader.skipped = num_batches
    return loader


# The Trainer looks this function up in its module; the original would make a loader that is not
# dealt out to workers.
trainer_module.skip_first_batches = _skip_first_batches


class _Distributed(Trainer):
    """The methods that are put in front of a Trainer's own class."""

    distribution: _Distribution

    @property
    def _batches(self) -> Batches:
        assert self.distribution.loader is not None
        assert self.distribution.loader.batches is not None
        return self.distribution.loader.batches

    def take_place(self) -> None:
        """Make Accelerate see a single process, and the arguments the place among the workers."""
        # Otherwise Accelerate would wrap the model, shard every loader and gather at every log.
        # Servers take no part in such collectives, which would never end.
        for state in (PartialState(), self.accelerator.state):
            state.distributed_type = DistributedType.NO
            state.num_processes = 1
            state.process_index = rank()
        # It would have process 0 read for all
        self.accelerator.dataloader_config.dispatch_batches = False
        launched = detect(os.environ)
        self.args.distributed_state = _WorkerState(
            self.distribution.workers,
            local_process_index=0 if launched is None else launched.local_rank,
        )
        # The state was filled in by the arguments of before
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.is_local_process_zero = self.is_local_process_zero()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.take_place()  # further arguments may have been made, which set up Accelerate anew
        return super().train(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Return the loader of all samples, whose length is that of one worker's part."""
        prepared = super().get_train_dataloader()
        return _Loader(prepared, self.distribution.workers, self.args.gradient_accumulation_steps)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        model, loader = super()._prepare_for_training(
            max_steps, train_dataloader, resume_from_checkpoint
        )
        distribution = self.distribution
        # As the Trainer chooses it for its sampler
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        _, _, batches = own_loops.distribute(
            # The optimizer inside Accelerate's wrapper: that one is replaced by no other
            self.model, self.optimizer.optimizer, loader.whole, distribution.strategy,
            seed=seed, work="equal", **distribution.options,
        )  # fmt: skip
        batches.serve_to_the_end()
        distribution.loader, loader.batches = loader, batches
        distribution.tokens = self.state.num_input_tokens_seen
        if resume_from_checkpoint is not None and not batches.ended:  # a server has served
            state = Path(resume_from_checkpoint) / STATE_NAME
            if state.exists():
                # Else it is a plain Trainer's checkpoint, whose parameters and moments are loaded
                batches.load_state_dict(torch.load(state, weights_only=True))
        return model, loader

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return a step's batches, and how many items all workers' have if gradients are averaged.

        A model divides its loss by this number. It is such that the average of the workers'
        gradients, which is weighted by samples, becomes the average over all items.
        """
        batch_samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = self._batches
        averaged = self.args.average_tokens_across_devices and batches.averages_gradients
        # An average of replicas' parameters has no single gradient to be divided
        if items is None or not averaged:
            return batch_samples, items
        share = batches.share
        own = float(items) if share else 0.0  # a repeated batch does not count
        total = batches.sum_over_workers(torch.tensor([own]))[0].to(device, torch.float32)
        # The gradient is weighted by the samples' share w of this worker; divided by w T, with T
        # items in all, the sum over the workers is the mean over all items.
        return batch_samples, total * share if share else total

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss, and report it to strategies that watch it."""
        found = super().compute_loss(model, inputs, *args, **kwargs)
        # item() waits for the device
        if self.distribution.strategy.traits().reads_loss and model.training:
            loss: Tensor = found[0] if isinstance(found, tuple) else found
            self._batches.report(loss.item())
        return found

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loader, batches = self.distribution.loader, self._batches
        assert loader is not None
        if batches.ended:
            return  # a rank that served to the end
        # Before logging, saving and evaluating, which need the agreed parameters
        ends_epoch = loader.exhausted or self.control.should_epoch_stop
        if ends_epoch or self.control.should_training_stop:
            loader.leave(ends_epoch=ends_epoch)
        logs = self.control.should_log and self.state.global_step > self._globalstep_last_logged
        control = self.control
        if logs or control.should_evaluate or control.should_save or control.should_training_stop:
            self._sum_tokens()
        # By number of workers, not of samples, as under DistributedDataParallel
        if logs and batches.averages_gradients:
            loss, workers = batches.sum_over_workers(torch.stack([tr_loss, tr_loss.new_ones(())]))
            tr_loss.copy_(loss / workers)
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)

    def _sum_tokens(self) -> None:
        """Add what the other workers have counted, since Accelerate, which should, sees one."""
        if self.args.include_num_input_tokens_seen != "no":
            known, state = self.distribution.tokens, self.state
            own = torch.tensor([state.num_input_tokens_seen - known])
            known += int(self._batches.sum_over_workers(own))
            self.distribution.tokens = state.num_input_tokens_seen = known

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the agreed parameters; in training with the first worker's metrics for all."""
        if self.distribution.loader is None:
            return super().evaluation_loop(*args, **kwargs)
        self._batches.agree()
        with self._batches.pause():
            output = super().evaluation_loop(*args, **kwargs)
            # After training, workers may evaluate alone, and a collective would never end.
            if self.is_in_train:
                self._share(output.metrics)
        return output

    def _share(self, metrics: dict[str, Any]) -> None:
        """Replace the metrics by the first worker's: all stop and choose by the same numbers."""
        names = [
            name
            for name, value in metrics.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        ]
        # Zeros from the others: the sum is the first one's numbers
        numbers = torch.zeros(len(names), dtype=torch.float64)
        if self.args.process_index == 0:
            numbers = torch.tensor([metrics[name] for name in names], dtype=torch.float64)
        metrics.update(zip(names, self._batches.sum_over_workers(numbers).tolist(), strict=True))

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._batches.agree()
        with self._batches.pause():
            super()._save_checkpoint(*args, **kwargs)
            self._wait_for_all()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = self._batches.state_dict()  # the first worker's optimizer has all moments then
        if self.args.should_save:
            torch.save(state, Path(output_dir) / STATE_NAME)
        super()._save_optimizer_and_scheduler(output_dir)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save on the first worker; during a checkpoint the others wait for it."""
        super().save_model(output_dir, _internal_call)
        if _internal_call:
            self._wait_for_all()

    def _wait_for_all(self) -> None:
        self._batches.sum_over_workers(torch.zeros(1))
