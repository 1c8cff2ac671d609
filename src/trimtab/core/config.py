"""The settings of a run, typed and validated: every key of a resolved configuration that is no part's knob."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trimtab.core.part import build_dataclass, check_knobs, knob


@dataclass(kw_only=True)
class SamplingConfig:
    """How training rollouts are drawn."""

    temperature: float = knob(1.0, "sampling temperature; log-probs everywhere are at this temperature", ge=1e-4)
    top_p: float = knob(1.0, "nucleus mass; 1 = off", gt=0, le=1)
    top_k: int = knob(0, "most likely tokens to draw from; 0 = off", ge=0)
    max_new_tokens: int = knob(256, "static response limit, tokens", ge=1)


@dataclass(kw_only=True)
class EngineConfig:
    """The rollout engine."""

    name: Literal["torch", "http", "vllm"] = knob(
        "torch",
        "torch: in this process; vllm: vLLM in this process; http: a server that returns token ids and log-probs",
    )
    slots: int = knob(256, "rollouts decoded at once; with http and vllm, requests sent at once", ge=1)
    prefill_tokens: int = knob(8192, "torch: prompt tokens prefilled at once", ge=1)
    url: str = knob("", "http: address of the server, such as http://127.0.0.1:8000")
    dialect: Literal["auto", "vllm", "sglang", "llamacpp"] = knob(
        "auto", "http: whose API the server speaks; auto = ask it"
    )
    served_model: str = knob("", "http: name of the model at the server; empty = its first")
    api_key_env: str = knob("", "http: environment variable with the server's API key; empty = none")
    chunk: int = knob(64, "http: tokens asked for at once where a stop part reads along; overrun is below this", ge=1)
    connect_timeout_s: float = knob(
        10.0, "http: seconds to connect, to answer a health check, to end after a failure", gt=0
    )
    timeout_s: float = knob(600.0, "http: seconds one request may take, of a whole response or of a chunk", gt=0)
    stall_s: float = knob(60.0, "http: seconds without any answer after which the server's health is asked", gt=0)
    retries: int = knob(3, "http: times a request is sent again after a lost connection or an answer 5xx", ge=0)
    weights_dir: str = knob(
        "", "http, vllm: folder for weight updates that the engine can read; empty = a temporary one"
    )
    memory_share: float = knob(0.4, "vllm: share of the device's memory for its weights and KV cache", gt=0, lt=1)
    eager: bool = knob(False, "vllm: no compilation and no CUDA graphs: starts sooner, decodes slower")


@dataclass(kw_only=True)
class LearnerConfig:
    """Optimiser and memory bounds of the learner."""

    lr: float = knob(1e-6, "learning rate", ge=0)
    beta1: float = knob(0.9, "AdamW beta 1", ge=0, lt=1)
    beta2: float = knob(0.999, "AdamW beta 2", ge=0, lt=1)
    eps: float = knob(1e-8, "AdamW epsilon", gt=0)
    weight_decay: float = knob(0.0, "AdamW decoupled weight decay", ge=0)
    grad_clip: float = knob(1.0, "largest gradient norm; 0 = no clipping", ge=0)
    warmup_steps: int = knob(0, "updates of linear learning-rate warm-up", ge=0)
    micro_batch_tokens: int = knob(16384, "packed tokens (prompt + response) of one micro-batch", ge=1)
    logprob_chunk: int = knob(2048, "tokens whose logits exist at once", ge=1)


@dataclass(kw_only=True)
class BudgetConfig:
    """What a run may spend besides its steps: it ends after the step that reaches the first bound. 0 = no bound."""

    tokens: int = knob(0, "tokens generated for training, those cut, dropped and overrun included", ge=0)
    trained_tokens: int = knob(0, "tokens that carried gradient", ge=0)
    seconds: float = knob(0.0, "wall seconds within steps, evaluations and checkpoints not counted", ge=0)


@dataclass(kw_only=True)
class EvalConfig:
    """Held-out evaluation."""

    num_problems: int = knob(256, "held-out problems", ge=0)
    every: int = knob(0, "steps between evaluations; 0 = only before and after", ge=0)
    every_tokens: int = knob(0, "generated tokens between evaluations; 0 = off", ge=0)
    points: int = knob(0, "evaluations at equal shares of the run, whatever bounds it; 0 = off", ge=0)
    samples: int = knob(1, "responses a problem; above 1, pass@k is estimated too", ge=1)
    temperature: float = knob(0.0, "sampling temperature; 0 = greedy", ge=0)
    max_new_tokens: int = knob(0, "response limit; 0 = that of training", ge=0)


@dataclass(kw_only=True)
class DataConfig:
    """Where prompts come from when the task is a file or a data set."""

    prompt_key: str = knob("prompt", "field with the prompt (text or chat messages)")
    answer_key: str = knob("answer", "field with the reference answer")
    verifier: str = knob("", "named verifier; empty = the task's own, or exact match for files")
    num_prompts: int = knob(4096, "training prompts drawn from a generating task", ge=1)
    holdout: float = knob(0.1, "share of a file's rows held out when it has no test split", ge=0, lt=1)
    max_prompt_tokens: int = knob(1024, "longer prompts are skipped and counted", ge=1)
    chat: bool = knob(True, "apply the tokenizer's chat template where it has one")
    system: str = knob("", "system message put before each prompt")


@dataclass(kw_only=True)
class VerifyConfig:
    """Bounds on reward functions."""

    timeout_s: float = knob(10.0, "seconds one verification may take", gt=0)
    graded: bool = knob(False, "use the task's graded score in place of right or wrong")


@dataclass(kw_only=True)
class OutputConfig:
    """What a run leaves behind."""

    dir: str = knob("", "run directory; empty = runs/<recipe>-<date>-<number>")
    checkpoint_every: int = knob(10, "steps between checkpoints; 0 = only at the end", ge=0)
    rollouts: bool = knob(True, "write rollouts as Parquet")
    report: bool = knob(True, "write report.html at the end")
    tensorboard: bool = knob(False, "write TensorBoard events too")


@dataclass(kw_only=True)
class RunConfig:
    """Everything of a run that is not a part."""

    model: str = knob("pocket:student", "policy: pocket:<name>, a folder, a GGUF file, smollm2-135m or a hub id")
    drop_layers: list[int] = knob(list, "layers removed from the policy before training", factory=True)
    teacher: str = knob("", "teacher model, spelled like model; empty = none")
    reference: str = knob("", "reference policy, spelled like model; empty = the starting policy when one is needed")
    task: str = knob("pocket:sums", "pocket:<family>, reasoning-gym:<name>, a JSONL or Parquet file, datasets:<id>")
    steps: int = knob(100, "policy updates", ge=0)
    seed: int = knob(0, "seed of data order, sampling and every decision")
    prompts_per_step: int = knob(32, "prompts rolled out a step", ge=1)
    group_size: int = knob(8, "rollouts a prompt where no allocator decides", ge=1)
    device: str = knob("auto", "cpu, cuda, cuda:1 ... or auto")
    dtype: Literal["float32", "bfloat16"] = knob("float32", "weights of policy and teacher in forward passes")
    threads: int = knob(0, "CPU threads; 0 = all", ge=0)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    data: DataConfig = field(default_factory=DataConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        check_knobs(self, "settings")

    @classmethod
    def build(cls, values: Mapping[str, Any]) -> RunConfig:
        """From a nested mapping; errors name the key path."""
        config: RunConfig = build_dataclass(cls, values, "settings")
        return config

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
