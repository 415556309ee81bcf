"""What a model learns: classify, segment, detect, and tasks registered elsewhere."""

from typing import TYPE_CHECKING

from visualtokens.lazy import lazy_names

if TYPE_CHECKING:
    from visualtokens.tasks.options import TaskOptions
    from visualtokens.tasks.task import (
        Checkpoint,
        Evaluation,
        Prediction,
        Task,
        Training,
        get_task,
        register_task,
    )

__all__ = [
    "Checkpoint",
    "Evaluation",
    "Prediction",
    "Task",
    "TaskOptions",
    "Training",
    "get_task",
    "register_task",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {name: "visualtokens.tasks.task:" for name in __all__} | {"TaskOptions": "visualtokens.tasks.options:"},
)
