"""Hugging Face Trainer: a mixin for subclasses, and :func:`attach` for a trainer that exists already.

class MyTrainer(CommHookMixin, transformers.Trainer): ...

MyTrainer(model=model, args=args, train_dataset=data, comm_hook=DearConfig()).train()

attach(trainer, DearConfig())
trainer.train()
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.neftune import activate_neftune, deactivate_neftune
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ddp_hooks.comm import see
from ddp_hooks.dear import DearConfig
from ddp_hooks.embedding import EmbeddingTables, shard_embeddings
from ddp_hooks.embedding.exchange.lookup import BatchRows
from ddp_hooks.embedding.step.prefetch import Announcement
from ddp_hooks.integrations import accelerate
from ddp_hooks.integrations.hooked_models import TABLES_FILE, tables_of
from ddp_hooks.integrations.settings import Config, combination_of
from ddp_hooks.intercept import clipping_of_frameworks

logger = logging.getLogger("ddp_hooks")

_TRAINER_STATE = "trainer_state.json"  # the last file that a Trainer writes into a checkpoint
_END = object()

if TYPE_CHECKING:
    _Trainer = transformers.Trainer
else:
    _Trainer = object


class CommHookMixin(_Trainer):
    """Trainer whose gradients travel by a communication hook. Put it before the Trainer among the base classes.

    Clipping, accumulation, mixed precision and evaluation work as before. A plain Trainer can resume its checkpoints,
    and the other way round. Logs contain the hook's statistics. The default of ``ddp_find_unused_parameters`` is
    False, and that of ``ddp_bucket_cap_mb`` 5.

    Args:
        comm_hook: a :class:`~ddp_hooks.DearConfig`, a :class:`~ddp_hooks.TopKConfig`, a
            :class:`~ddp_hooks.QuantizedConfig`, :class:`~ddp_hooks.integrations.Tables`, which the trainer shards and
            prefetches, or a list of one of the first three and tables; with ``TrainingArguments(fsdp=True)``, a
            :class:`~fsdp_ext.ExtConfig`. None: a plain Trainer.

    Raises:
        TypeError, ValueError: see :func:`ddp_hooks.integrations.accelerate.attach`.
    """

    _comm_hook: Config | None = None
    _attachment: accelerate.Attachment | None = None
    _tables: EmbeddingTables | None = None
    _lookahead: _Lookahead | None = None
    _follows_schedule: bool = False
    _has_consolidated: bool = False  # tables since the last step, on every rank

    def __init__(self, *args: Any, comm_hook: Config | None = None, **kwargs: Any) -> None:
        if comm_hook is not None:
            combination_of(comm_hook)  # raises before the model is moved
        self._comm_hook = comm_hook
        super().__init__(*args, **kwargs)

    def comm_hook_stats(self) -> dict[str, float]:
        """Return statistics of this rank's last step, as they are logged."""
        return self._attachment.stats() if self._attachment is not None else {}

    def synchronize(self) -> None:
        """Wait until parameters hold their new values, for C++ code and other processes that read them."""
        if self._attachment is not None:
            self._attachment.synchronize()

    # -- models and optimizers --------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, and attach the hook; a search for hyper-parameters does so several times."""
        self._detach()
        super().create_accelerator_and_postprocess()
        self._attach()

    def _attach(self) -> None:
        if self._comm_hook is None:
            return
        self._attachment = accelerate.attach(self.accelerator, self._comm_hook)
        handler = self.accelerator.ddp_handler
        if not isinstance(handler, accelerate.HookedDdpKwargs):
            return  # one process, or FSDP2
        self._attachment.keeps_models = True
        models = self._attachment.hooked_models
        if self.args.auto_find_batch_size and isinstance(models.dense, DearConfig):
            # Every size wraps the model anew, which would lose shards of the optimizer.
            logger.info('auto_find_batch_size: DeAR uses update="replicated", so ranks keep whole optimizer states')
            models.dense = replace(models.dense, update="replicated")
        clipping_of_frameworks["a Trainer"] = "its max_grad_norm"
        if self.args.ddp_find_unused_parameters is None:
            handler.find_unused_parameters = False
        if self.args.ddp_bucket_cap_mb is not None:
            handler.bucket_cap_mb = self.args.ddp_bucket_cap_mb

    def _detach(self) -> None:
        if self._attachment is not None:
            self._attachment.close()
        if self._tables is not None:
            self._tables.close()
        self._attachment, self._tables, self._lookahead = None, None, None

    def _inner_training_loop(self, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        if self._attachment is not None and self.accelerator.num_processes > 1:
            kept = None if self.args.auto_find_batch_size else self.model  # model_init may have made another one
            self._attachment.hooked_models.release(but=kept)
            self._shard()
        try:
            return super()._inner_training_loop(batch_size, *args, **kwargs)
        except RuntimeError as error:
            if self._attachment is not None and "find_unused_parameters" in str(error):
                raise RuntimeError(
                    f"{error}\n\nIn a Trainer with a communication hook that is "
                    f"TrainingArguments(ddp_find_unused_parameters=True); left out, it means False here, which spares "
                    f"every step a walk through the graph{see('in-a-trainer')}"
                ) from error
            raise

    def _shard(self) -> None:
        """Make tables of the model's embeddings, if the configuration has tables and the model has none."""
        assert self._comm_hook is not None
        settings = combination_of(self._comm_hook).tables
        if settings is None:
            return
        self._follows_schedule = settings.follow_schedule
        assert self.model is not None
        if self._tables is not None and self._tables is not tables_of(self.model):
            self._tables.close()
        self._tables = tables_of(self.model)
        if self._tables is None:
            if self.optimizer is not None:
                raise ValueError(
                    f"the optimizer was made before tables are cut out of the model, and holds whole ones: pass "
                    f"optimizer_cls_and_kwargs=(class, arguments) instead of optimizers, or call shard_embeddings() "
                    f"yourself before making it{see('in-a-trainer')}"
                )
            options = {"lr": self.args.learning_rate, **settings.options}
            if self.neftune_noise_alpha is not None:  # a hook on the embedding that is about to be replaced
                deactivate_neftune(self.model, self.neftune_hook_handle, self.accelerator)
            self._tables = shard_embeddings(
                self.model, None, settings.modules, settings.optimizer_class, config=settings.config, **options
            )
            if self.neftune_noise_alpha is not None:
                self.neftune_hook_handle = activate_neftune(self.model, self.neftune_noise_alpha, self.accelerator)
        if settings.ids is not None:
            self._lookahead = _Lookahead(self._tables, settings.ids)

    # -- steps ------------------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        source = self._lookahead.over(epoch_iterator) if self._lookahead is not None else epoch_iterator
        return super().get_batch_samples(source, num_batches, device)

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        self._has_consolidated = False
        if self._tables is not None and self._follows_schedule and self.optimizer is not None:
            _follow_learning_rate(self._tables, self.optimizer)
        if self._lookahead is not None:
            self._lookahead.announce()
        return super().training_step(model, inputs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate with whole tables on every rank, because ranks may have different numbers of batches."""
        with self._tables.local() if self._tables is not None else nullcontext():
            return super().evaluation_loop(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs = {**logs, **self.comm_hook_stats()}
        super().log(logs, *args, **kwargs)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; ``resume_from_checkpoint=True`` takes the last complete checkpoint."""
        if resume_from_checkpoint is True and self._attachment is not None:
            assert self.args.output_dir is not None
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir) or True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._consolidate_tables()  # for save_model() on the first rank alone
        return super()._finalize_training(*args, **kwargs)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._consolidate_tables()

    def _consolidate_tables(self) -> None:
        if self._tables is not None:
            self._tables.consolidate(None if self.args.save_on_each_node else 0)
            self._has_consolidated = True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; during training all ranks call it if there are sharded tables."""
        if self.is_in_train and not _internal_call and not self._has_consolidated:
            self._consolidate_tables()
        super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        attachment, with_optimizer = self._attachment, not self.args.save_only_model
        self.synchronize()  # the first rank alone reads the model
        if attachment is None or not (with_optimizer or self._tables is not None):
            super()._save_checkpoint(model, trial)
            return
        everywhere = self.args.save_on_each_node
        with attachment.hooked_models.complete(everywhere):
            if with_optimizer:
                folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
                if self.args.should_save:  # first make another run's checkpoint in the same place incomplete
                    for path in [folder / _TRAINER_STATE, *folder.glob("ddp_hooks*.bin")]:
                        path.unlink(missing_ok=True)
                    shutil.rmtree(folder / accelerate.FSDP_FOLDER, ignore_errors=True)
                self.accelerator.wait_for_everyone()
                attachment.hooked_models.save(folder, everywhere)
            super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._attachment is not None:
            self.accelerator.wait_for_everyone()  # the Trainer's last file, which comes next, marks completeness

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self._tables is not None:
            folder = Path(checkpoint)
            if (folder / "optimizer.pt").exists() and not (folder / TABLES_FILE).exists():
                raise ValueError(
                    f"{checkpoint} was saved without sharded tables, so its optimizer has a state for whole ones: "
                    f"resume it without tables, or begin with its weights alone, with "
                    f"model.from_pretrained({checkpoint!r}){see('in-a-trainer')}"
                )
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self._attachment is not None:
            self._attachment.hooked_models.load(checkpoint)


class _Lookahead:
    """Draws one batch ahead, and announces each when its training begins: a Trainer draws several at a time."""

    def __init__(self, tables: EmbeddingTables, ids: Callable[[Any], Any]) -> None:
        self._tables = tables
        self._ids = ids
        self._source: Iterator[Any] | None = None
        self._drawn: Any = _END  # the batch ahead
        self._rows: deque[BatchRows] = deque()  # of batches that are not trained with yet, the one ahead included

    def over(self, source: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of ``source``; several calls with the same source continue it."""
        if source is not self._source:
            self._tables.announcements.withdraw(self)
            self._rows.clear()
            self._source, self._drawn = source, _END
            self._draw(source)
        while self._drawn is not _END:
            batch = self._drawn
            self._draw(source)
            yield batch

    def _draw(self, source: Iterator[Any]) -> None:
        self._drawn = next(source, _END)
        if self._drawn is not _END:
            self._rows.append(self._tables.rows_of(self._ids(self._drawn)))

    def announce(self) -> None:
        if self._rows:
            current = self._rows.popleft()
            upcoming = self._rows[0] if self._rows else None
            self._tables.announcements.announce(self, Announcement(self, current, upcoming))


def attach(trainer: transformers.Trainer, config: Config) -> None:
    """Turn an existing trainer, such as TRL's, into one with :class:`CommHookMixin`; its class keeps its name.

    Raises:
        TypeError, ValueError: see :func:`ddp_hooks.integrations.accelerate.attach`; the trainer has trained already.
    """
    combination_of(config)
    if isinstance(trainer, CommHookMixin) and trainer._comm_hook is not None:
        raise ValueError(f"this trainer {accelerate.HAS_HOOK}{see('in-a-trainer')}")
    if not isinstance(trainer, CommHookMixin):
        kind = type(trainer)
        trainer.__class__ = type(kind.__name__, (CommHookMixin, kind), {"__module__": kind.__module__})
    assert isinstance(trainer, CommHookMixin)
    trainer._comm_hook = config
    trainer._attach()


def last_complete_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint of a Trainer; None if there is none.

    A process that is killed while it writes leaves an incomplete folder, which the Trainer itself would resume.
    """
    folders = [folder for folder in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if folder.is_dir()]
    steps = {folder: folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-") for folder in folders}
    numbered = [folder for folder in folders if steps[folder].isdecimal()]
    for folder in sorted(numbered, key=lambda folder: int(steps[folder]), reverse=True):
        try:
            json.loads((folder / _TRAINER_STATE).read_text())
            return str(folder)
        except (OSError, ValueError):
            logger.warning("%s was not written to its end, so training does not resume from it", folder)
    return None


def _follow_learning_rate(tables: EmbeddingTables, optimizer: torch.optim.Optimizer) -> None:
    """Set tables' rates = their first rates × present rate / first rate of the first group of ``optimizer``."""
    leading = optimizer.param_groups[0]
    first = leading.get("initial_lr", optimizer.defaults.get("lr"))  # some schedulers do not set it
    factor = leading["lr"] / first if first else 1.0
    for group in tables.optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
