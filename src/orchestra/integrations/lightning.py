"""Lightning's Trainer on any distribution strategy of Orchestra's.

    from orchestra.integrations.lightning import OrchestraStrategy

    trainer = lightning.Trainer(strategy=OrchestraStrategy("AllReduce('ring')"))

docs/integrations-lightning.md says what happens to what a fit does.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from orchestra.engines.processes.distribute import (
    distribute,
    end_loops,
    runtime_beside_loops,
)
from orchestra.engines.processes.environment import detect, rank
from orchestra.errors import InputError
from orchestra.integrations.worker_group import WorkerGroup
from orchestra.strategies.base import Strategy, roles_of
from orchestra.strategies.registry import strategy_of
from orchestra.trainer.own_loop.batches import Batches

try:
    import lightning.pytorch as lightning
    from lightning.fabric.utilities.data import _auto_add_worker_init_fn
    from lightning.pytorch.strategies import ParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning_utilities.core.rank_zero import rank_zero_only
    from torchmetrics.metric import Metric, jit_distributed_available
except ImportError as error:
    raise InputError(
        f"orchestra.integrations.lightning needs Lightning ({error}): "
        "pip install 'neural-orchestra[lightning]'"
    ) from None

T = TypeVar("T")
STATE = "orchestra"
"""The place of Orchestra's state in a checkpoint of Lightning's."""


class OrchestraStrategy(ParallelStrategy):
    """Trains with `orchestra.distribute`; pass it to `lightning.Trainer(strategy=...)`.

    The processes are those that torchrun or another launcher has started; without one there is
    one worker. Orchestra deals out the training data, and Lightning's samplers those of an
    evaluation. Every worker gets equally many training batches.

    Args:
        strategy: an object such as `AllReduce("ring")`, or its notation as text.
        seed: of the order of the samples; by default that of `lightning.seed_everything`, or 0.
        bucket_megabytes: as in `orchestra.distribute`, like all that follow.
        patience: seconds without an exchange or a training step until a worker counts as hung. An
            evaluation, saving, and what is done between epochs may take longer.
        host: the local address that the other ranks are to use.

    Raises:
        InputError: `strategy` is none. From `fit`: what was asked for cannot be done.
    """

    def __init__(
        self,
        strategy: Strategy[Any] | str,
        *,
        seed: int | None = None,
        bucket_megabytes: float = 25.0,
        overlap: bool = True,
        patience: float = 60.0,
        host: str | None = None,
    ) -> None:
        super().__init__()
        self._orchestra = strategy_of(strategy)
        self._seed = seed
        self._options: dict[str, Any] = {"bucket_megabytes": bucket_megabytes, "overlap": overlap}
        self._place: dict[str, Any] = {"patience": patience, "host": host}
        self._launched = detect(os.environ)
        ranks = 1 if self._launched is None else self._launched.ranks
        self._first_workers = roles_of(self._orchestra, ranks).workers
        self._group: WorkerGroup | None = None
        self._batches: Batches | None = None  # once the model is distributed
        self._epoch: Generator[Any, None, None] | None = None  # training batches of the one begun
        self._evaluating: tuple[int, ...] = ()  # the workers that the data are dealt out to
        self._state: dict[str, Any] | None = None  # of a checkpoint that is being made
        self._to_load: dict[str, Any] | None = None

    # Who and where this process is

    @property
    def global_rank(self) -> int:
        return rank()

    @property
    def local_rank(self) -> int:
        return 0 if self._launched is None else self._launched.local_rank

    @property
    def world_size(self) -> int:
        """How many workers there are; ranks that only serve do not count."""
        return 1 if self._serves else len(self._workers)

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank % len(self.parallel_devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        ranks = (self.global_rank,) if self._group is None else self._group.ranks
        return {"num_replicas": len(ranks), "rank": ranks.index(self.global_rank)}

    @property
    def _workers(self) -> tuple[int, ...]:
        return self._first_workers if self._batches is None else self._batches.workers

    @property
    def _serves(self) -> bool:
        return self.global_rank not in self._workers

    @property
    def is_distributed(self) -> bool:
        """True if Lightning deals out the data of a loader that it asks for now: those of
        training, which is the only one before `distribute`, are Orchestra's to deal out."""
        return self._batches is not None or not self._trainer.training

    @property
    def _trainer(self) -> lightning.Trainer:
        return self._module.trainer

    @property
    def _module(self) -> lightning.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _distributed(self) -> Batches:
        assert self._batches is not None
        return self._batches

    # Set-up

    def set_world_ranks(self) -> None:
        """Let Lightning log and save on the first rank alone."""
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        """Come together with the other ranks; an earlier fit ends here."""
        super().setup_environment()
        devices = len(self.parallel_devices or ())
        if self._launched is None and devices > 1:
            raise InputError(
                f"{devices} devices, but OrchestraStrategy starts no processes: run the script "
                f"by torchrun --nproc-per-node {devices}, or set Trainer(devices=1)"
            )
        runtime = runtime_beside_loops(**self._place)
        self._reporter = runtime.reporter
        self._group = WorkerGroup(runtime.transport, lambda: self._workers)
        if self._trainer.state.fn == TrainerFn.FITTING:
            end_loops()
            self._batches = self._epoch = self._to_load = None
        self._reporter.phase("paused")

    def setup(self, trainer: lightning.Trainer) -> None:
        """Let the model's metrics come together; refuse what would be trained wrongly."""
        super().setup(trainer)
        for metric in self._metrics():
            assert self._group is not None
            metric.distributed_available_fn = self._group.is_several
            metric.dist_sync_fn = self._group.gather
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if not self._module.automatic_optimization or len(self.optimizers) != 1:
            raise InputError(
                "OrchestraStrategy trains with automatic optimization and one optimizer: give all "
                "parameters to one, or write the loop with orchestra.distribute"
            )
        if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
            raise InputError(
                "Trainer(reload_dataloaders_every_n_epochs=...): the training data are dealt out "
                "once, so that they cannot be loaded anew: let the data set change itself"
            )
        if self._layer_sync is not None:
            raise InputError(
                "Trainer(sync_batchnorm=True) needs a process group of torch.distributed: use "
                "GroupNorm, or plain BatchNorm"
            )

    def teardown(self) -> None:
        """Return to a single process: also the metrics."""
        for metric in self._metrics():
            metric.distributed_available_fn = jit_distributed_available
            metric.dist_sync_fn = None
        super().teardown()

    def _metrics(self) -> list[Metric]:
        """Return those of the model that would ask torch.distributed for the other workers."""
        modules = [] if self.model is None else self.model.modules()
        ours = None if self._group is None else self._group.gather
        metrics = [module for module in modules if isinstance(module, Metric)]
        return [metric for metric in metrics if metric.dist_sync_fn in (None, ours)]

    def process_dataloader(self, dataloader: object) -> object:
        """Distribute model and optimizer when the training data are there.

        A dedicated server serves in here; its script ends with those of the workers.
        """
        if not self._trainer.training:
            return dataloader
        if self._batches is not None:
            raise InputError(
                "OrchestraStrategy deals out one training loader: combine the data sets into one"
            )
        assert self.model is not None
        loader: Any = dataloader
        _auto_add_worker_init_fn(loader, self.global_rank)
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if self._seed is None else self._seed
        _, _, self._batches = distribute(
            self.model, self.optimizers[0], loader, self._orchestra,
            seed=seed, work="equal", **self._options, **self._place,
        )  # fmt: skip
        if self._batches.ended:  # a server, whose workers have come to another fit
            return []
        if self._to_load is not None:
            self._batches.load_state_dict(self._to_load)
        self._to_load = None
        self._evaluating = self._workers
        return _TrainingData(loader, self)

    # A step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Through the module's `__call__`, which Orchestra has its hooks in."""
        module = self._module
        with self.precision_plugin.train_step_context():
            return self._forward_redirection(module, module, "training_step", *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Inside are the backward passes that accumulate, but for the last one."""
        with self._distributed.accumulate():
            yield

    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._orchestra.reads_loss and self._batches is not None:
            self._batches.report(closure_loss.item() * self._trainer.accumulate_grad_batches)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """After the last one of an epoch every worker's model holds the agreed parameters."""
        output = super().optimizer_step(*args, **kwargs)
        if self._trainer.is_last_batch:
            self._settle()
        if self._evaluating != self._workers:
            self._follow_switch()
        return output

    def _follow_switch(self) -> None:
        """Some workers have become servers: the others evaluate, and these serve to the end."""
        self._evaluating = self._workers
        self._trainer.fit_loop.epoch_loop.val_loop._combined_loader = None
        if self._serves:
            self._leave_epoch()
            self._distributed.serve_to_the_end()
            self._trainer.should_stop = True  # the workers have come to another fit

    def begin_epoch(self) -> Generator[Any, None, None]:
        """Return the training batches of this worker."""
        if self._epoch is not None:  # Lightning has skipped the rest
            self._settle(over=True)
        self._epoch = iter(self._distributed)
        return self._epoch

    def _settle(self, *, over: bool = False) -> None:
        """Let the models agree; at the end of Lightning's epoch Orchestra's ends, too."""
        if self._epoch is None:
            return
        if not over and not self._trainer.is_last_batch:
            self._distributed.agree()
            return
        self._leave_epoch()
        self._distributed.end_epoch()
        self._reporter.phase("paused")

    def _leave_epoch(self) -> None:
        if self._epoch is not None:
            self._epoch.close()
        self._epoch = None

    def on_train_end(self) -> None:
        if self._epoch is not None:
            self._epoch.close()
        self._settle()
        self._epoch = None
        self._reporter.phase("paused")

    # Evaluation

    def on_validation_start(self) -> None:
        """What is evaluated is the agreed model, in mid-epoch, too."""
        self._settle()
        self._reporter.phase("paused")

    def on_validation_end(self) -> None:
        if self._epoch is not None:
            self._reporter.phase("training")

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the agreed model; in mid-epoch the workers agree here."""
        self._settle()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """On the first worker, with the moments that lie in parts on other ranks."""
        if self._batches is None or self._batches.ended:
            return super().optimizer_state(optimizer)
        self._state = self._batches.state_dict()
        return super().optimizer_state(optimizer) if self.is_global_zero else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """With Orchestra's state, unless only weights are saved."""
        if self._state is not None and "optimizer_states" in checkpoint:
            checkpoint[STATE] = self._state
        self._state = None
        self._reporter.phase("paused")
        super().save_checkpoint(checkpoint, *args, **kwargs)
        self.on_validation_end()

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        self._to_load = checkpoint.pop(STATE, None)
        return checkpoint

    # Between processes

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any | None = "mean"
    ) -> Tensor | Any:
        """Return the same on all workers; what is no tensor stays as it is."""
        _check_group(group)
        if not isinstance(tensor, Tensor) or self._group is None:
            return tensor
        return self._group.reduce(tensor, getattr(reduce_op, "name", reduce_op) or "mean")

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return bool(self.reduce(torch.tensor(decision), reduce_op="min" if all else "max"))

    def barrier(self, name: str | None = None) -> None:
        if self._group is not None:
            self._group.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """JSON data alone, since nothing that arrives is unpickled."""
        result: T = obj if self._group is None else self._group.broadcast(obj, src)
        return result

    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Return all workers' tensors, of one shape, stacked."""
        _check_group(group)
        if sync_grads:
            raise InputError("all_gather(sync_grads=True): gradients do not flow to other workers")
        if self._group is None or not self._group.is_several():
            return tensor
        return torch.stack(self._group.gather(tensor))


def _check_group(group: Any | None) -> None:
    if group is not None:
        raise InputError("OrchestraStrategy has no process groups: leave out group=")


class _TrainingData:
    """The training batches of this worker, as Lightning iterates them."""

    def __init__(self, loader: Any, strategy: OrchestraStrategy) -> None:
        # Lightning tells these the number of the epoch.
        self.sampler = getattr(loader, "sampler", None)
        self.batch_sampler = getattr(loader, "batch_sampler", None)
        self._strategy = strategy

    def __len__(self) -> int:
        return len(self._strategy._distributed)

    def __iter__(self) -> Iterator[Any]:
        yield from self._strategy.begin_epoch()
