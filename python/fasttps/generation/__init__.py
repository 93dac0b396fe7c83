"""`fasttps.generate`: the loop over tokens, thin enough not to show beside a small model.

sampling.py   logits to the next token, with the distribution of transformers' processors
stepper.py    tokens to logits: what a loop asks of a model
text.py       tokens to text as they come; stop strings
loop.py       `generate`, which ties them together
"""

from __future__ import annotations

from fasttps.generation.loop import Generation, generate
from fasttps.generation.sampling import Sampler, Sampling
from fasttps.generation.stepper import ModelStepper, Stepper
from fasttps.generation.text import StopStrings, TextStream

__all__ = [
    "Generation",
    "ModelStepper",
    "Sampler",
    "Sampling",
    "Stepper",
    "StopStrings",
    "TextStream",
    "generate",
]
