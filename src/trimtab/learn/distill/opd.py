"""On-policy distillation: the student samples, a frozen teacher reads along and gives a signal per token.

Sources: GKD, arXiv 2306.13649 (on-policy, generalised JSD: equation 1); "On-Policy Distillation", Thinking Machines,
2025 (``sampled``); Rethinking On-Policy Distillation, arXiv 2604.13016, with its release thunlp/OPD (``topk``);
``tail`` is ours.

With p_t the student's and q_t the teacher's next-token distribution on the student's own prefix, both over the whole
vocabulary, and everything but the current log-probs detached:

- ``sampled``: A_t = beta_kl sum_{u >= t} gamma^(u-t) m_u r_u with r_t = log q_t(y_t) - log p_old,t(y_t).
- ``topk``: on a set S_t of candidates, A_t(v) = -beta_kl w_t(v) (log p_old,t(v) - log q_t(v)), with w_t(v) = p_t(v) /
  sum_{u in S_t} p_t(u) (or of q, or uniform). S_t: the student's top k (``only_stu``), the teacher's (``only_tch``),
  what is in both (``intersection``), in either (``union``, duplicates once), or in exactly one
  (``union-intersection``, w not normalised). An empty S_t gives 0. With k = V this is the exact gradient of KL(p ||
  q).
- ``full``: loss beta_kl JSD_b(p, q) over the vocabulary, M = (1 - b) p + b q, JSD_b = b KL(q || M) + (1 - b) KL(p ||
  M); the ends are the reverse KL(p || q) at b = 1 (default) and the forward KL(q || p) at b = 0.
- ``tail``: KL(p || q) on the candidates plus one outcome with the rest of the mass: never negative, at most the full
  KL.
- ``forward_kl_topk``: sum over the teacher's top k of q (log q - log p), at least 0, supervised.
- ``k2``, ``k3``: supervised on the sampled token, d = log q - log p: d^2 / 2 (expected gradient that of the reverse
  KL) and e^d - d - 1 (that of the forward KL). k1 = -d is not offered: its expected gradient is 0.

``sampled`` and ``topk`` make advantages, which the objective turns into a clipped policy-gradient loss; the others
are losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal

from trimtab.core.errors import ConfigError
from trimtab.core.lazy import lazy
from trimtab.core.part import Needs, Part, knob
from trimtab.core.slots import Distill, DistillView

if TYPE_CHECKING:
    import torch

    from trimtab.core.config import RunConfig
else:
    torch = lazy("torch")

Variant = Literal["sampled", "topk", "full", "tail", "forward_kl_topk", "k2", "k3"]
Strategy = Literal["only_stu", "only_tch", "intersection", "union", "union-intersection"]
Weight = Literal["student_p", "teacher_p", "none"]
D_CLAMP = 20.0
LEAST_MASS = 1e-6  # below it, float32 cannot tell the rest of the mass from rounding
READ_BY = {  # knobs that only some variants read
    "gamma": ("sampled",),
    "jsd_beta": ("full",),
    "strategy": ("topk", "tail"),
    "weight": ("topk",),
}


def discounted(value_T: torch.Tensor, row_T: torch.Tensor, gamma: float) -> torch.Tensor:
    """sum_{u >= t} gamma^(u - t) value_u within each row (T,), in log2(T) doubling steps."""
    total_T, shift = value_T, 1
    while gamma > 0 and shift < len(total_T):
        same_row = row_T[shift:] == row_T[:-shift]
        ahead = torch.where(same_row, total_T[shift:], torch.zeros_like(total_T[shift:]))
        total_T = torch.cat([total_T[:-shift] + gamma**shift * ahead, total_T[-shift:]])
        shift *= 2
    return total_T


def contained(a_TK: torch.Tensor, b_TJ: torch.Tensor) -> torch.Tensor:
    """Whether each id of ``a`` is among the ids of ``b`` at the same position (T, K) bool."""
    return (a_TK[:, :, None] == b_TJ[:, None, :]).any(-1)


def candidate_ids(
    strategy: Strategy, student_ids: torch.Tensor | None, teacher_ids: torch.Tensor | None
) -> torch.Tensor:
    """The ids of a strategy (T, K) or, for the unions, (T, 2K); which of them count is :func:`member_mask`."""
    if strategy == "only_tch":
        assert teacher_ids is not None
        return teacher_ids
    assert student_ids is not None
    if strategy in ("only_stu", "intersection"):
        return student_ids
    assert teacher_ids is not None
    return torch.cat([student_ids, teacher_ids], -1)


def member_mask(
    strategy: Strategy, student_ids: torch.Tensor | None, teacher_ids: torch.Tensor | None, ids: torch.Tensor
) -> torch.Tensor:
    """True where a candidate of :func:`candidate_ids` belongs to S_t; every member once (shape of ``ids``)."""
    if strategy in ("only_stu", "only_tch"):
        return torch.ones_like(ids, dtype=torch.bool)
    assert student_ids is not None
    assert teacher_ids is not None
    shared = contained(student_ids, teacher_ids)
    if strategy == "intersection":
        return shared
    own = torch.ones_like(shared) if strategy == "union" else ~shared
    return torch.cat([own, ~contained(teacher_ids, student_ids)], -1)


def candidate_weights(
    old: torch.Tensor, teacher: torch.Tensor, member: torch.Tensor, mode: Weight, normalise: bool
) -> torch.Tensor:
    """w_t(v) (T, K): probabilities of student or teacher, or equal ones, over the members; 0 elsewhere."""
    logit = {"student_p": old, "teacher_p": teacher, "none": torch.zeros_like(old)}[mode]
    logit = torch.where(member, logit, -torch.inf)
    weight = torch.softmax(logit, -1) if normalise else logit.exp()
    return torch.where(member, weight, torch.zeros_like(weight))  # a softmax over no member is NaN


def topk_reward(old: torch.Tensor, teacher: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """R_t(v) = -w (log p - log q) (T, K); exactly 0 where the weight is."""
    return torch.where(weight > 0, -weight * (old - teacher), torch.zeros_like(weight))


def jsd(student_logp: torch.Tensor, teacher_logp: torch.Tensor, beta: float) -> torch.Tensor:
    """Generalised Jensen-Shannon divergence over the last axis, (C, V) log-probs -> (C,); ends as in the module."""
    if beta == 1:
        return kl(student_logp, teacher_logp)
    if beta == 0:
        return kl(teacher_logp, student_logp)
    b = torch.tensor(beta, dtype=student_logp.dtype, device=student_logp.device)
    mixed = torch.logaddexp(student_logp + (1 - b).log(), teacher_logp + b.log())
    return b * kl(teacher_logp, mixed) + (1 - b) * kl(student_logp, mixed)


def kl(a_logp: torch.Tensor, b_logp: torch.Tensor) -> torch.Tensor:
    """KL(a || b) over the last axis."""
    return (a_logp.exp() * (a_logp - b_logp)).sum(-1)


def tail_kl(logp: torch.Tensor, teacher: torch.Tensor, member: torch.Tensor) -> torch.Tensor:
    """KL on the member candidates (T, K) plus one bin with the rest of both masses (T,)."""
    p = torch.where(member, logp.exp(), torch.zeros_like(logp))
    q = torch.where(member, teacher.exp(), torch.zeros_like(teacher))
    inside = torch.where(member, p * (logp - teacher), torch.zeros_like(logp)).sum(-1)
    rest_p = (1 - p.sum(-1)).clamp(min=LEAST_MASS)
    rest_q = (1 - q.sum(-1)).clamp(min=LEAST_MASS)
    return inside + rest_p * (rest_p.log() - rest_q.log())


def forward_kl(logp: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """sum_v q (log q - log p) over the candidates, at least 0 (T,)."""
    return kl(teacher, logp).clamp(min=0)


def supervised(logp_T: torch.Tensor, teacher_T: torch.Tensor, estimator: Literal["k2", "k3"]) -> torch.Tensor:
    """k2 or k3 loss on the sampled tokens (T,)."""
    d_T = teacher_T - logp_T
    if estimator == "k2":
        return d_T.square() / 2
    d_T = d_T.clamp(-D_CLAMP, D_CLAMP)
    return d_T.exp() - d_T - 1


@dataclass(kw_only=True)
class OPD(Distill):
    """The teacher's signal per token, in all its published forms."""

    inert: ClassVar[dict[str, object] | None] = {"variant": "sampled", "beta_kl": 0.0, "task_coef": 1.0}

    variant: Variant = knob("topk", "form of the signal")
    k: int = knob(16, "candidates a token (thunlp/OPD 16; verl's forward KL 32)", ge=1)
    strategy: Strategy = knob("only_stu", "whose top k are the candidates S_t")
    weight: Weight = knob("student_p", "weights w_t(v) of the candidates")
    beta_kl: float = knob(1.0, "factor beta_kl on the teacher's signal", ge=0)
    gamma: float = knob(0.0, "discount of later rewards, 'sampled' only; 0 = each token its own", ge=0, le=1)
    jsd_beta: float = knob(1.0, "b of the generalised JSD, 'full' only; 1 = reverse KL, 0 = forward KL", ge=0, le=1)
    teacher_temperature: float = knob(1.0, "temperature of the teacher's distribution", gt=0)
    task_coef: float = knob(0.0, "factor on the task's own advantage; 0 = pure distillation", ge=0)

    def needs(self) -> Needs:
        if self.variant in ("sampled", "full", "k2", "k3"):
            return Needs(teacher=True, verdicts=self.task_coef > 0)
        student_k = 0 if self.variant == "forward_kl_topk" or self.strategy == "only_tch" else self.k
        return Needs(teacher=True, teacher_topk=self.k, topk=student_k, verdicts=self.task_coef > 0)

    def check(self, parts: Mapping[str, list[Part]], settings: RunConfig) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if self.variant not in READ_BY.get(f.name, (self.variant,)) and value != f.default:
                readers = " or ".join(READ_BY[f.name])
                raise ConfigError(
                    f"distill.{f.name}: {value!r} has no effect with variant={self.variant}. Set variant={readers}, or "
                    f"leave it at {f.default!r}."
                )
        if not parts["objective"] and (self.variant in ("sampled", "topk") or self.task_coef > 0):
            raise ConfigError(
                f"distill.variant: {self.variant!r} makes advantages and needs an objective to turn them into a loss. "
                "Add objective=clip, or choose variant=full."
            )

    def signal(self) -> Literal["sampled", "candidates", "full"]:
        if self.variant == "sampled":
            return "sampled"
        return "full" if self.variant == "full" else "candidates"

    def task_weight(self) -> float:
        return self.task_coef

    def whole_rows(self) -> bool:
        return self.gamma > 0

    def token_advantage(self, view: DistillView) -> torch.Tensor:
        reward_T = view.teacher_T - view.old_T
        if view.mask_T is not None:
            reward_T = torch.where(view.mask_T, reward_T, torch.zeros_like(reward_T))
        return self.beta_kl * discounted(reward_T, view.row_T, self.gamma)

    def candidates(self, view: DistillView) -> torch.Tensor:
        if self.variant in ("k2", "k3"):
            return view.token_T[:, None]
        if self.variant == "forward_kl_topk":
            return candidate_ids("only_tch", None, self.top(view.teacher_ids))
        return candidate_ids(self.strategy, self.top(view.student_ids), self.top(view.teacher_ids))

    def candidate_advantage(self, view: DistillView, ids: torch.Tensor, old: torch.Tensor) -> torch.Tensor | None:
        if self.variant != "topk":
            return None
        teacher = self.teacher_logp(view)
        member = self.members(view, ids)
        normalise = self.strategy != "union-intersection"
        weight = candidate_weights(old, teacher, member, self.weight, normalise)
        return self.beta_kl * topk_reward(old, teacher, weight)

    def candidate_loss(self, view: DistillView, ids: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
        if self.variant == "tail":
            return self.beta_kl * tail_kl(logp, self.teacher_logp(view), self.members(view, ids))
        if self.variant == "forward_kl_topk":
            teacher = self.top(view.teacher_logp)
            assert teacher is not None
            return self.beta_kl * forward_kl(logp, teacher)
        assert self.variant in ("k2", "k3"), self.variant
        return self.beta_kl * supervised(logp[:, 0], view.teacher_T, self.variant)

    def full_loss(self, student_logp: torch.Tensor, teacher_logp: torch.Tensor) -> torch.Tensor:
        return self.beta_kl * jsd(student_logp, teacher_logp, self.jsd_beta)

    def top(self, values_TK: torch.Tensor | None) -> torch.Tensor | None:
        """The first k columns: another part may have asked for more, and columns are ranked."""
        return None if values_TK is None else values_TK[:, : self.k]

    def members(self, view: DistillView, ids: torch.Tensor) -> torch.Tensor:
        """Which candidates belong to S_t (shape of ``ids``)."""
        return member_mask(self.strategy, self.top(view.student_ids), self.top(view.teacher_ids), ids)

    def teacher_logp(self, view: DistillView) -> torch.Tensor:
        """The teacher's log-probs of the candidates, in the order of :func:`candidate_ids`."""
        on_student, own = self.top(view.teacher_on_student), self.top(view.teacher_logp)
        parts = {"only_stu": [on_student], "intersection": [on_student], "only_tch": [own]}
        found = [logp for logp in parts.get(self.strategy, [on_student, own]) if logp is not None]
        return torch.cat(found, -1)
