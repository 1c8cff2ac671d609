"""The one transformer that both generates and trains, its attention plans, its loaders and tokenizers."""
