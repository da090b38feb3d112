"""Neural networks: diffusers models, one file per architecture."""
