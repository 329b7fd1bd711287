"""Which keys a settings file may have, of which kind, and which it may not have and why."""

from offbeat.deploy.tables import Kind

_SIMULATED = "which is of simulations only"
TABLES = dict.fromkeys(("task", "training", "privacy", "secure", "network", "watch"), Kind.TABLE)
TASK = dict.fromkeys(("module", "losses", "test"), Kind.WORD)
TRAINING = {
    "algorithm": Kind.WORD,
    "parameters": Kind.TABLE,
    "clients": Kind.WHOLE,
    "buffer": Kind.WHOLE,
    "concurrency": Kind.WHOLE,
    "dispatch": Kind.WORD,
    "hand_out": Kind.WORD,
    "weights": Kind.WORD,
    "limit": Kind.WHOLE,
    "rounds": Kind.WHOLE,
    "local_steps": Kind.WHOLE,
    "local_epochs": Kind.WHOLE,
    "examples": Kind.WHOLE,
    "batch_size": Kind.WHOLE,
    "weight_decay": Kind.NUMBER,
    "seed": Kind.WHOLE,
    "every": Kind.WHOLE,
    "average": Kind.NUMBER,
    "precision": Kind.WORD,
    "device": Kind.WORD,
}
NOT_TRAINING = dict.fromkeys(
    ("data", "data_dir", "model", "partition", "delays", "availability", "dropout", "engine", "how"),
    _SIMULATED,
) | dict.fromkeys(("workers", "ray_address", "memory"), _SIMULATED)
PRIVACY = {
    "clip": Kind.BOUND,
    "noise": Kind.NUMBER,
    "epsilon": Kind.NUMBER,
    "delta": Kind.NUMBER,
    "most": Kind.WHOLE,
    "apart": Kind.WHOLE,
    "noise_shape": Kind.WORD,
    "accountant": Kind.WORD,
    "adaptive_clip": Kind.NUMBER,
}
NOT_PRIVACY = dict.fromkeys(("nominal_cohort", "noise_seed", "simulate_amplification"), _SIMULATED) | {
    "amplified": "but sites come and go, so nothing is amplified"
}
SECURE = {
    "helper": Kind.WORD,
    "certificate": Kind.WORD,
    "token": Kind.WORD,
    "minimum": Kind.WHOLE,
    "signed": Kind.SWITCH,
}
NETWORK = {
    "deadline": Kind.NUMBER,
    "poll": Kind.NUMBER,
    "patience": Kind.NUMBER,
    "most_bytes": Kind.WHOLE,
    "most_norm": Kind.NUMBER,
    "bound": Kind.SWITCH,
}
WATCH = {"port": Kind.WHOLE, "host": Kind.WORD}
ABSENT = frozenset({*NOT_TRAINING, *NOT_PRIVACY})  # of an experiment's settings that mean nothing here
