"""The recipes: one file each, its settings and the little that it adds to a plain training loop."""

from leanbayes.methods.deterministic import Deterministic
from leanbayes.methods.ensemble import Ensemble
from leanbayes.methods.mc_dropout import MCDropout
from leanbayes.methods.mean_field import MeanField
from leanbayes.methods.pbn import PBN
from leanbayes.methods.registry import METHODS, describe_method, get_method, parse_method
from leanbayes.methods.rigl import RigL
from leanbayes.methods.ssvi import SSVI
from leanbayes.methods.vdp import VDP
from leanbayes.methods.weight_sharing import WeightSharing

__all__ = [
    "METHODS",
    "PBN",
    "SSVI",
    "VDP",
    "Deterministic",
    "Ensemble",
    "MCDropout",
    "MeanField",
    "RigL",
    "WeightSharing",
    "describe_method",
    "get_method",
    "parse_method",
]
