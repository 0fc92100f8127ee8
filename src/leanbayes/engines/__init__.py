"""Engines: how the means and stds of a posterior are trained, independent of the posterior and of the method.

base        What an engine is: from a model and the settings of a training to its optimizers.
backprop    Gradients of the ELBO with respect to μ and ρ, for any optimizer (Bayes by Backprop).
ivon        The natural-gradient update, as one optimizer of its own (IVON).
"""

from leanbayes.engines.backprop import Backprop
from leanbayes.engines.base import ENGINES, Engine, OptimizerSettings, make_optimizers, register_engine
from leanbayes.engines.ivon import IVON

__all__ = ["ENGINES", "IVON", "Backprop", "Engine", "OptimizerSettings", "make_optimizers", "register_engine"]
