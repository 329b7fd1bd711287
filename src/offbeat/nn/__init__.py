"""Models as functions of one parameter vector: problems, layers, built-in models and transformers."""
