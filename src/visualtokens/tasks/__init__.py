"""What a model learns: classify, segment, detect, and tasks registered elsewhere."""

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
