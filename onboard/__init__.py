"""Take an open-weights checkpoint to a served, measured and signed-off NVFP4 bundle."""

__version__ = "0.1.0"
