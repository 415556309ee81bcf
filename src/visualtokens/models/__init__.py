"""The model families; importing this package registers them with timm."""

from visualtokens.models import deit as deit
from visualtokens.models import paca_vit as paca_vit
from visualtokens.models import pvt_v2 as pvt_v2
from visualtokens.models import resnet as resnet
from visualtokens.models import stvit as stvit
from visualtokens.models import swin_iso as swin_iso
from visualtokens.models import vt_resnet as vt_resnet
from visualtokens.models.registry import create_model, list_models
from visualtokens.models.vt_stage import add_vt_stage

__all__ = ["add_vt_stage", "create_model", "list_models"]
