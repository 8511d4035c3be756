"""What the pages ask the ledger, as SQL that SQLite and PostgreSQL share. Pure.

Each panel shows its statement, and that text is what was executed: numbers are filled in as literals, so it runs unchanged in `sqlite3` and
`psql`. Only numbers are ever filled in. Each has a limit, named here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_RUNS, MOST_STEPS, MOST_MARKS, MOST_SAMPLES = 20, 500, 200, 200
MOST_SEARCHED = 2_000
MOST_STEP_ENGINES, MOST_SINCE, MOST_BACK, MOST_COMPARED = 200, 20, 100, 6
MOST_GROUP, MOST_LEASES, MOST_ENDS, MOST_TURNS, MOST_DECISIONS, MOST_WAITS = 16, 500, 200, 50, 100, 200
MOST_CALLS, MOST_EPISODES, MOST_POLICIES = 200, 50, 64

#: Where a run that is open stands in the list of runs: so much above its number, and so above all that ended.
ACTIVE_PLACE = 1_000_000_000_000

RUNS = """-- Runs before a place: the open ones first, then those that ended, each the newest first.
WITH placed AS (SELECT run_id, run_id + CASE WHEN state = 'active' THEN 1000000000000 ELSE 0 END AS place FROM v_runs)
SELECT r.run_id, r.name, r.owner, r.state, r.reason, r.attempt, r.last_step, r.last_version, r.created_at, r.ended_at
FROM placed p JOIN v_runs r ON r.run_id = p.run_id WHERE p.place < {before} ORDER BY p.place DESC LIMIT {most}"""

RUN = """-- One run.
SELECT run_id, name, owner, state, reason, attempt, last_step, last_version, tokenizer, created_at, ended_at
FROM v_runs WHERE run_id = {run_id}"""

#: Characters of metrics that are read: of one row, and of a run's rows together. A run that keeps to both is drawn whole.
MOST_METRICS, MOST_RUN_METRICS = 65_536, 8_000_000

#: Before every step, and after every time in Unix seconds.
NO_STEP, NO_TIME = 2**62, 1e15

#: `cut`: 1 where a step's metrics are not read. Sizes are asked first: a database sorts no text that is not shown.
STEPS = """-- The newest train steps of a run below a number that no later attempt undid; of their metrics 64 Ki characters, 8 M together.
WITH newest AS (
  SELECT id, length(metrics) AS size FROM v_steps WHERE run_id = {run_id} AND purpose = 'train' AND rewound_by IS NULL AND step < {before}
  ORDER BY id DESC LIMIT {most}
), counted AS (
  SELECT id, sum(size) OVER (ORDER BY id DESC) AS so_far FROM newest WHERE size <= 65536
)
SELECT s.step, s.attempt, s.version, CASE WHEN c.so_far <= 8000000 THEN substr(s.metrics, 1, 65536) ELSE '{{}}' END AS metrics,
       CASE WHEN c.so_far <= 8000000 THEN 0 ELSE 1 END AS cut, s.committed_at
FROM newest n JOIN v_steps s ON s.id = n.id LEFT JOIN counted c ON c.id = n.id ORDER BY s.id DESC"""

MARKS = """-- Engines of a run that left until a Unix time, newest first: what ended the allocation of its last engine, and their tokens.
SELECT w.left_at, w.place AS node, w.job_id, w.kind, w.reason,
       CASE WHEN w.worker_id = (SELECT max(worker_id) FROM v_workers x WHERE x.intent_id = h.intent_id AND x.incarnation = h.restart_count)
            THEN COALESCE(h.reason, '') ELSE '' END AS allocation_ended,
       CASE WHEN w.notice IS NULL THEN '' WHEN w.notice THEN 'notice' ELSE 'none' END AS notice, w.samples, w.salvaged, w.regenerated
FROM v_workers w LEFT JOIN v_gpu_allocations h ON h.intent_id = w.intent_id AND h.restart_count = w.incarnation
WHERE w.run_id = {run_id} AND w.left_at <= {until} ORDER BY w.left_at DESC, w.worker_id LIMIT {most}"""

COUNTS = """-- How many steps and evaluations a run has that no later attempt went back before, and engines that left.
SELECT (SELECT count(*) FROM v_steps WHERE run_id = {run_id} AND purpose = 'train' AND rewound_by IS NULL) AS steps,
       (SELECT count(*) FROM v_steps WHERE run_id = {run_id} AND purpose = 'eval' AND rewound_by IS NULL) AS evaluations,
       (SELECT count(*) FROM v_workers WHERE run_id = {run_id} AND left_at IS NOT NULL) AS engines"""

STEP = """-- One train step, of each attempt that committed it, newest first.
SELECT s.step, s.attempt, s.version, s.rewound_by,
       CASE WHEN length(s.metrics) <= 65536 THEN substr(s.metrics, 1, 65536) ELSE '{{}}' END AS metrics,
       CASE WHEN length(s.metrics) <= 65536 THEN 0 ELSE 1 END AS cut, a.started_at AS attempt_started_at, s.committed_at
FROM v_steps s LEFT JOIN v_attempts a ON a.run_id = s.run_id AND a.attempt = s.attempt
WHERE s.run_id = {run_id} AND s.purpose = 'train' AND s.step = {step} ORDER BY s.id DESC LIMIT {most}"""

#: `until`: when the step was committed. Leases of an engine less than `gap` seconds apart are one spell.
_SPELLS = """WITH leased AS (
  SELECT l.worker_id, l.sample_id, l.epoch, l.granted_at,
         CASE WHEN l.ended_at IS NULL THEN s.accepted_len ELSE l.end_len END - l.start_len AS n,
         CASE WHEN COALESCE(l.ended_at, n.unix_s) < {until} THEN COALESCE(l.ended_at, n.unix_s) ELSE {until} END AS until_at
  FROM v_groups g JOIN v_samples s ON s.group_id = g.group_id JOIN v_leases l ON l.sample_id = s.sample_id CROSS JOIN v_now n
  WHERE g.run_id = {run_id} AND g.purpose IN ('train', 'turn') AND g.step = {step} AND l.granted_at >= {since}
), previous AS (
  SELECT worker_id, sample_id, epoch, granted_at, n, until_at, max(until_at) OVER (PARTITION BY worker_id
         ORDER BY granted_at, sample_id, epoch ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before_at FROM leased
), numbered AS (
  SELECT worker_id, granted_at, until_at, n, sum(CASE WHEN granted_at <= before_at + {gap} THEN 0 ELSE 1 END) OVER (PARTITION BY worker_id
         ORDER BY granted_at, sample_id, epoch ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS spell FROM previous
), spells AS (
  SELECT worker_id, min(granted_at) AS granted_at, max(until_at) AS until_at, sum(n) AS tokens FROM numbered GROUP BY worker_id, spell
)
"""

STEP_LEASES = (
    """-- How long which engine generated samples of a train step, or turns during it, and when; of an attempt that began at a Unix time.
"""
    + _SPELLS.replace("{gap}", "0")
    + """SELECT worker_id, min(granted_at) AS granted_at, max(until_at) AS until_at, sum(tokens) AS tokens,
       sum(CASE WHEN until_at > granted_at THEN until_at - granted_at ELSE 0 END) AS generating_s
FROM spells GROUP BY worker_id ORDER BY worker_id"""
)

#: `workers`: whole numbers, joined by commas, as `listed` gives them.
STEP_SPELLS = (
    """-- When some engines generated samples of a train step, or turns during it; with no gap that is too short to be seen.
"""
    + _SPELLS
    + """SELECT worker_id, granted_at, until_at FROM spells WHERE worker_id IN ({workers}) AND until_at > granted_at
ORDER BY worker_id, granted_at"""
)

STEP_ENGINES = """-- Engines of a run that were there between two times, in Unix seconds.
SELECT w.worker_id, w.kind, w.place AS node, w.gpus, w.joined_at, COALESCE(w.left_at, n.unix_s) AS until_at, count(*) OVER () AS engines
FROM v_workers w CROSS JOIN v_now n
WHERE w.run_id = {run_id} AND w.joined_at < {until} AND (w.left_at IS NULL OR w.left_at > {since})
ORDER BY w.kind DESC, w.worker_id LIMIT {most}"""

SAME_PROMPTS = """-- Steps before a train step that completed prompts of it, or of the evaluation after it, and how many.
WITH asked AS (
  SELECT DISTINCT purpose, prompt FROM groups
  WHERE run_id = {run_id} AND step = {step} AND purpose IN ('train', 'eval') AND length(prompt) > 0
)
SELECT b.step AS since_step, b.purpose, count(DISTINCT b.prompt) AS prompts
FROM asked a JOIN groups b ON b.run_id = {run_id} AND b.purpose = a.purpose AND b.prompt = a.prompt
WHERE b.step < {step} AND b.step >= {step} - {back}
GROUP BY b.step, b.purpose ORDER BY b.step DESC, b.purpose LIMIT {most}"""

CHANGED = """-- Prompts that two steps completed, those whose mean reward changed most first.
WITH scored AS (
  SELECT g.group_id, g.purpose, g.step, g.prompt, avg(s.reward) AS reward, avg(s.accepted_len) AS tokens
  FROM groups g JOIN samples s ON s.group_id = g.group_id
  WHERE g.run_id = {run_id} AND g.step IN ({since}, {step}) AND g.purpose IN ('train', 'eval') AND length(g.prompt) > 0
  GROUP BY g.group_id, g.purpose, g.step, g.prompt
)
SELECT a.purpose, b.group_id AS group_then, a.group_id AS group_now, b.reward AS reward_then, a.reward AS reward_now,
       a.reward - b.reward AS change, b.tokens AS tokens_then, a.tokens AS tokens_now
FROM scored a JOIN scored b ON b.prompt = a.prompt AND b.purpose = a.purpose AND b.step = {since}
WHERE a.step = {step} ORDER BY abs(COALESCE(a.reward - b.reward, 0)) DESC, a.group_id, b.group_id LIMIT {most}"""

#: Of a prompt that was generated again, such as for a step that a later attempt repeated, only the last samples count.
REWARD_RANGE = """-- The least and the greatest reward of a step's samples that were not superseded.
WITH own AS (
  SELECT s.reward FROM v_groups g JOIN v_samples s ON s.group_id = g.group_id
  WHERE g.run_id = {run_id} AND g.purpose = 'train' AND g.step = {step} AND s.state <> 'superseded'
    AND abs(s.reward) <= 1.7976931348623157e308
)
SELECT 'least' AS bound, min(reward) AS reward FROM own UNION ALL SELECT 'greatest' AS bound, max(reward) AS reward FROM own"""

#: `bin`: as `filled_bins` fills it in.
REWARDS = """-- How many samples of a step that were not superseded have a reward of which bin.
SELECT CASE {bin} END AS bin, count(*) AS samples
FROM v_groups g JOIN v_samples s ON s.group_id = g.group_id
WHERE g.run_id = {run_id} AND g.purpose = 'train' AND g.step = {step} AND s.state <> 'superseded'
  AND abs(s.reward) <= 1.7976931348623157e308
GROUP BY 1 ORDER BY 1"""

#: `only`: 0 all, 1 moved, 2 masked, 3 cut off, 4 filtered, 5 of groups of several whose rewards are all equal.
#: `order`: 0 by number, 1 best first, 2 worst first. `ranged`: of those that `REWARDS` counts, `low` <= reward < `high`.
SAMPLES = """-- Samples of a train step.
SELECT s.sample_id, s.group_id, s.sample_index, s.state, s.reason, s.finish, s.accepted_len, s.moves, s.regenerated, s.reward, s.advantage
FROM v_groups g JOIN v_samples s ON s.group_id = g.group_id
WHERE g.run_id = {run_id} AND g.purpose = 'train' AND g.step = {step}
  AND ({only} = 0 OR ({only} = 1 AND s.moves > 0) OR ({only} = 2 AND s.state = 'masked') OR ({only} = 3 AND s.finish = 'length')
       OR ({only} = 4 AND s.state = 'filtered')
       OR ({only} = 5 AND s.group_id IN (
         SELECT e.group_id FROM v_groups e JOIN v_samples r ON r.group_id = e.group_id
         WHERE e.run_id = {run_id} AND e.purpose = 'train' AND e.step = {step}
         GROUP BY e.group_id HAVING count(r.reward) > 1 AND min(r.reward) = max(r.reward))))
  AND ({ranged} = 0 OR (s.reward >= {low} AND s.reward < {high} AND s.state <> 'superseded'))
ORDER BY CASE WHEN {order} = 0 THEN 0.0 WHEN s.reward IS NULL THEN 1e300 WHEN {order} = 1 THEN -s.reward ELSE s.reward END, s.sample_id
LIMIT {most}"""

#: The same of an evaluation, which has the number of the step that it came after.
EVALUATION, EVALUATION_REWARD_RANGE, EVALUATION_REWARDS, EVALUATION_SAMPLES = (
    sql.replace("One train step", "One evaluation")
    .replace("of a step", "of an evaluation")
    .replace("of a train step", "of an evaluation")
    .replace("purpose = 'train'", "purpose = 'eval'")
    for sql in (STEP, REWARD_RANGE, REWARDS, SAMPLES)
)
EVALUATIONS = STEPS.replace("train steps of a run", "evaluations of a run").replace("'train'", "'eval'")

GROUP = """-- The samples of one group.
SELECT s.sample_id, s.run_id, g.purpose, g.step, s.sample_index, s.state, s.reason, s.finish, s.accepted_len, s.moves, s.reward,
       s.advantage, g.prompt_tokens, g.n
FROM v_groups g JOIN v_samples s ON s.group_id = g.group_id WHERE g.group_id = {group_id} ORDER BY s.sample_index LIMIT {most}"""

PLACE = """-- Which of the prompts of its step, or of its evaluation, a group is of; an agent's turn has no such place.
SELECT g.purpose, g.prompt_index, g.retry, count(DISTINCT CASE WHEN o.prompt_index <= g.prompt_index THEN o.prompt_index END) AS place,
       count(DISTINCT o.prompt_index) AS prompts
FROM v_groups g JOIN v_groups o ON o.run_id = g.run_id AND o.purpose = g.purpose AND o.step = g.step
WHERE g.group_id = {group_id} AND g.purpose IN ('train', 'eval') GROUP BY g.purpose, g.prompt_index, g.retry"""

META = """-- What came with a group's prompt: the other columns of its row, as JSON; of it at most 64 Ki characters.
SELECT length(meta) AS meta_length, substr(meta, 1, 65536) AS meta FROM groups WHERE group_id = {group_id}"""

SAMPLE = """-- One sample, its group, and its place in an episode if it is of a turn.
SELECT s.sample_id, s.group_id, s.run_id, g.purpose, g.step, s.sample_index, g.n, s.state, s.reason, s.finish, g.prompt_tokens,
       s.accepted_len, s.moves, s.regenerated, s.reward, s.advantage, COALESCE(t.episode_id, 0) AS episode_id
FROM v_samples s JOIN v_groups g ON g.group_id = s.group_id LEFT JOIN v_turns t ON t.group_id = g.group_id
WHERE s.sample_id = {sample_id}"""

LEASES = """-- The engines that had one sample, in order: from which length to which, and why each lease ended.
SELECT l.epoch, l.worker_id, COALESCE(w.kind, '') AS kind, COALESCE(w.place, '') AS node, COALESCE(w.job_id, 0) AS job_id, l.version,
       l.start_len, CASE WHEN l.ended_at IS NULL THEN s.accepted_len ELSE l.end_len END AS end_len, l.regenerated, l.reason,
       l.granted_at, COALESCE(l.ended_at, n.unix_s) AS until_at
FROM v_leases l JOIN v_samples s ON s.sample_id = l.sample_id CROSS JOIN v_now n
LEFT JOIN v_workers w ON w.worker_id = l.worker_id
WHERE l.sample_id = {sample_id} ORDER BY l.epoch LIMIT {most}"""

ENDS = """-- What became of one sample: each end and reopening.
SELECT at, state, reason, step, attempt, reward, advantage FROM v_sample_ends WHERE sample_id = {sample_id} ORDER BY id LIMIT {most}"""

LEARNED = """-- The metrics of the step that learned from one sample.
SELECT t.step, t.attempt, CASE WHEN length(t.metrics) <= 65536 THEN substr(t.metrics, 1, 65536) ELSE '{{}}' END AS metrics,
       CASE WHEN length(t.metrics) <= 65536 THEN 0 ELSE 1 END AS cut
FROM v_samples s JOIN v_steps t ON t.run_id = s.run_id AND t.purpose = 'train' AND t.step = s.ended_step AND t.attempt = s.ended_attempt
WHERE s.sample_id = {sample_id} AND s.state = 'consumed' LIMIT 1"""

STEP_EPISODES = """-- The episodes that a train step was taken with: turns that it took, their tokens, and how often one moved.
SELECT e.episode_id, e.name, min(s.state) AS state, max(s.reward) AS reward, max(s.advantage) AS advantage,
       count(DISTINCT t.group_id) AS turns, sum(s.accepted_len) AS tokens, sum(s.moves) AS moves, e.begun_at, e.ended_at
FROM v_samples s JOIN v_turns t ON t.group_id = s.group_id JOIN v_episodes e ON e.episode_id = t.episode_id
WHERE s.run_id = {run_id} AND s.ended_step = {step} AND s.state IN ('consumed', 'filtered', 'masked')
GROUP BY e.episode_id, e.name, e.begun_at, e.ended_at ORDER BY e.episode_id LIMIT {most}"""

EVALUATION_EPISODES = STEP_EPISODES.replace("a train step was taken with", "an evaluation played").replace(
    "IN ('consumed', 'filtered', 'masked')", "= 'evaluated'"
)

EPISODES = """-- The newest episodes of a run.
SELECT e.episode_id, e.name, e.state, e.reason, (SELECT count(*) FROM v_turns t WHERE t.episode_id = e.episode_id) AS turns, e.begun_at,
       e.ended_at
FROM v_episodes e WHERE e.run_id = {run_id} ORDER BY e.episode_id DESC LIMIT {most}"""

EPISODE_FACTS = """-- What an episode is: its run and name, the step that was taken with it, and what that paid.
SELECT r.name AS run, e.name, e.state, min(s.ended_step) AS step, max(s.reward) AS reward, max(s.advantage) AS advantage, e.worker,
       e.begun_at, e.ended_at
FROM v_episodes e JOIN v_runs r ON r.run_id = e.run_id
LEFT JOIN v_turns t ON t.episode_id = e.episode_id
LEFT JOIN v_samples s ON s.group_id = t.group_id AND s.state IN ('consumed', 'filtered', 'masked', 'evaluated')
WHERE e.episode_id = {episode_id} GROUP BY r.name, e.name, e.state, e.worker, e.begun_at, e.ended_at LIMIT 1"""

EPISODE = """-- The turns of an episode and their samples, in order.
SELECT t.number, t.begun_at, s.sample_id, t.parent_id, t.prefix_len, t.prompt_tokens, t.added_tokens, t.between_s, t.model_s,
       t.completion_tokens, s.state, s.finish, s.moves, s.reward
FROM v_episode_turns t JOIN v_samples s ON s.sample_id = t.sample_id WHERE t.episode_id = {episode_id}
ORDER BY t.number, s.sample_index LIMIT {most}"""

POLICIES = """-- The policies of an episode: each run's part of it, and what became of it at the run's trainer.
WITH mine AS (
    SELECT e.name, COALESCE((SELECT d.source_run_id FROM v_deliveries d WHERE d.episode_id = e.episode_id), e.run_id) AS player
    FROM v_episodes e WHERE e.episode_id = {episode_id}
)
SELECT r.name AS run, o.episode_id, (SELECT count(*) FROM v_turns t WHERE t.episode_id = o.episode_id) AS turns, d.reward, d.state,
       d.ended_step AS step, d.advantage, d.reason
FROM mine m
JOIN v_episodes o ON o.name = m.name
JOIN v_runs r ON r.run_id = o.run_id
LEFT JOIN v_deliveries d ON d.episode_id = o.episode_id
WHERE o.run_id = m.player OR d.source_run_id = m.player
ORDER BY o.episode_id LIMIT {most}"""

TOOL_CALLS = """-- The calls of an episode's tools whose effects are outside, each at the turn after whose begin it was asked.
SELECT (SELECT max(t.number) FROM v_turns t WHERE t.episode_id = c.episode_id AND t.begun_at <= c.asked_at) AS turn, c.tool, c.state,
       c.answered_at - c.asked_at AS seconds, c.answer_bytes, c.call, c.asked_at, c.answered_at
FROM v_tool_calls c WHERE c.episode_id = {episode_id} ORDER BY c.asked_at, c.call_id LIMIT {most}"""

NEWEST = """-- The newest samples of a run that have tokens.
SELECT s.sample_id, s.group_id, g.purpose, g.step, s.state, s.finish, s.accepted_len, s.reward
FROM v_samples s JOIN v_groups g ON g.group_id = s.group_id WHERE s.run_id = {run_id} AND s.accepted_len > 0
ORDER BY s.sample_id DESC LIMIT {most}"""

GROUPS = """-- The groups of a train step, or turns of it, each before its samples; with their episode, 0 = none.
SELECT 'group' AS kind, g.group_id AS id, g.group_id AS group_id, 0 AS place, COALESCE(t.episode_id, 0) AS episode_id, 0 AS moves
FROM v_groups g LEFT JOIN v_turns t ON t.group_id = g.group_id
WHERE g.run_id = {run_id} AND g.purpose IN ('train', 'turn') AND g.step = {step}
UNION ALL
SELECT 'sample' AS kind, s.sample_id AS id, g.group_id AS group_id, s.sample_id AS place, COALESCE(t.episode_id, 0) AS episode_id,
       s.moves AS moves
FROM v_groups g JOIN v_samples s ON s.group_id = g.group_id LEFT JOIN v_turns t ON t.group_id = g.group_id
WHERE g.run_id = {run_id} AND g.purpose IN ('train', 'turn') AND g.step = {step}
ORDER BY group_id, place LIMIT {most}"""

EVALUATION_GROUPS = GROUPS.replace("of a train step, or turns of it", "of an evaluation").replace(
    "IN ('train', 'turn')", "= 'eval'"
)

KEPT = """-- Groups, samples that moved and samples that did not, of a run's committed steps and evaluations; and its episodes with a turn.
SELECT count(DISTINCT CASE WHEN t.episode_id IS NULL THEN g.group_id END) AS groups,
       COALESCE(sum(CASE WHEN s.moves > 0 THEN 1 ELSE 0 END), 0) AS moved,
       COALESCE(sum(CASE WHEN s.moves > 0 THEN 0 ELSE 1 END), 0) AS unmoved,
       (SELECT count(DISTINCT u.episode_id) FROM v_turns u WHERE u.run_id = {run_id}) AS episodes
FROM v_groups g JOIN v_samples s ON s.group_id = g.group_id LEFT JOIN v_turns t ON t.group_id = g.group_id
WHERE g.run_id = {run_id} AND EXISTS (
  SELECT 1 FROM v_steps e WHERE e.run_id = g.run_id AND e.step = g.step AND e.rewound_by IS NULL
    AND e.purpose = CASE WHEN g.purpose = 'eval' THEN 'eval' ELSE 'train' END)"""

#: `samples`: whole numbers, joined by commas, as `filled_list` fills them in.
CHUNKS = """-- The first 6,000 tokens of some samples, packed int32.
SELECT sample_id, substr(tokens, 1, CAST(4 * (6000 - start_len) AS integer)) AS tokens
FROM chunks WHERE sample_id IN ({samples}) AND start_len < 6000 ORDER BY sample_id, start_len"""

MARKED = """-- The tokens of some samples, packed int32, with the engine's logprobs, packed float32.
SELECT sample_id, start_len, n_tokens, version, worker_id, tokens, logprobs FROM chunks WHERE sample_id IN ({samples})
ORDER BY sample_id, start_len"""

DIFFERENCES = """-- The trainer's logprob less the engine's of each token of some samples, packed float16; of each step that trained them.
SELECT sample_id, step, attempt, n_tokens, mean, differences FROM token_differences WHERE sample_id IN ({samples}) ORDER BY id"""

APART = """-- The mean of |the trainer's logprob less the engine's| over one sample's tokens, in nats; of the steps that trained it last.
SELECT step, attempt, n_tokens, mean FROM v_token_differences WHERE sample_id = {sample_id} ORDER BY id DESC LIMIT {most}"""

PROMPT = """-- A group's prompt as token ids, packed int32; of an agent's turn what it adds to the turn before.
SELECT length(prompt) / 4 AS tokens, prompt FROM groups WHERE group_id = {group_id}"""

#: `cluster` is '' for the daemon's own.
WAITS_BY_DAY = """-- Other users' waits that a poll saw, with GPUs of ours there and without, by day (UTC) they began, cluster, partition.
WITH waits AS (
  SELECT w.cluster, w.partition, w.harvested_gpu_s, CASE WHEN w.harvested_gpus > 0 THEN 1 ELSE 0 END AS beside,
         (CAST(w.eligible_at AS bigint) - CASE WHEN CAST(w.eligible_at AS bigint) > w.eligible_at THEN 1 ELSE 0 END) / 86400 AS day,
         CASE WHEN w.ended_at IS NULL THEN 1 ELSE 0 END AS open,
         CASE WHEN COALESCE(w.started_at, w.ended_at, n.unix_s) > w.eligible_at
              THEN COALESCE(w.started_at, w.ended_at, n.unix_s) - w.eligible_at ELSE 0 END AS waited_s
  FROM v_other_users_waits w CROSS JOIN v_now n
)
SELECT d.day_utc, w.cluster, w.partition, sum(w.beside) AS waits_with_us,
       round(CAST(avg(CASE WHEN w.beside = 1 THEN w.waited_s END) AS numeric), 1) AS mean_s_with_us,
       round(CAST(max(CASE WHEN w.beside = 1 THEN w.waited_s END) AS numeric), 1) AS longest_s_with_us,
       sum(1 - w.beside) AS waits_without_us,
       round(CAST(avg(CASE WHEN w.beside = 0 THEN w.waited_s END) AS numeric), 1) AS mean_s_without_us,
       round(CAST(max(CASE WHEN w.beside = 0 THEN w.waited_s END) AS numeric), 1) AS longest_s_without_us, sum(w.open) AS still_waiting,
       round(CAST(sum(w.harvested_gpu_s) / 3600 AS numeric), 4) AS harvested_gpu_hours_meanwhile
FROM waits w JOIN v_days d ON d.day = w.day
GROUP BY d.day_utc, w.cluster, w.partition ORDER BY d.day_utc DESC, w.cluster, w.partition"""

PREEMPTIONS_BY_DAY = """-- Harvested allocations that Slurm preempted, by day (UTC); "kept": the GPUs were ours after the engine left.
WITH ended AS (
  SELECT (CAST(h.ended_at AS bigint) - CASE WHEN CAST(h.ended_at AS bigint) > h.ended_at THEN 1 ELSE 0 END) / 86400 AS day,
         CASE WHEN w.notice THEN 1 ELSE 0 END AS with_notice,
         COALESCE(w.salvaged, 0) AS salvaged, COALESCE(w.regenerated, 0) AS regenerated,
         CASE WHEN w.notice THEN CASE WHEN h.ended_at > w.left_at THEN h.ended_at - w.left_at ELSE 0 END END AS kept_s
  FROM v_gpu_allocations h LEFT JOIN v_workers w ON w.worker_id = (
    SELECT max(worker_id) FROM v_workers x WHERE x.intent_id = h.intent_id AND x.incarnation = h.restart_count)
  WHERE h.ended_at IS NOT NULL AND h.reason = 'preempted'
)
SELECT d.day_utc, count(*) AS preempted, sum(e.with_notice) AS engines_with_notice,
       round(CAST(avg(e.kept_s) AS numeric), 1) AS mean_kept_s, round(CAST(max(e.kept_s) AS numeric), 1) AS longest_kept_s,
       sum(e.salvaged) AS tokens_salvaged, sum(e.regenerated) AS tokens_regenerated
FROM ended e JOIN v_days d ON d.day = e.day
GROUP BY d.day_utc ORDER BY d.day_utc DESC"""

DECISIONS = """-- Decisions before one, newest first.
SELECT id, at, policy, action, substr(subject, 1, 400) AS subject, code, cluster, substr(reason, 1, 400) AS reason
FROM v_decisions WHERE id < {before} ORDER BY id DESC LIMIT {most}"""

DECISION = """-- One decision with what it was decided from, of that at most 256 Ki characters.
SELECT id, at, policy, action, substr(subject, 1, 400) AS subject, code, cluster, substr(reason, 1, 400) AS reason,
       length(inputs) AS inputs_length, substr(inputs, 1, 262144) AS inputs
FROM v_decisions WHERE id = {id}"""

ANY_POLL = """-- Whether any poll of a cluster is known.
SELECT at FROM v_cluster_polls LIMIT 1"""

PULSE = """-- Changes with every transaction of the ledger's writer.
SELECT COALESCE(max(generation), 0) AS generation, COALESCE(sum(batch), 0) AS batches FROM v_generations"""


def filled(sql: str, **numbers: float) -> str:
    """The statement with its numbers as literals, ended by a semicolon. Raises `TypeError` for what is no number."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise TypeError(f"{name} is no finite number")
    return sql.format(**{name: repr(value) for name, value in numbers.items()}) + ";"


def filled_bins(sql: str, edges: Sequence[float], **numbers: float) -> str:
    """The statement with the number of a reward's bin, from 0, in place of `bin`. `edges`: the bins' lower ones, and the last upper one."""
    upper = {f"edge_{i}": edge for i, edge in enumerate(edges[1:])}
    cases = " ".join(f"WHEN s.reward < {{edge_{i}}} THEN {i}" for i in range(len(upper)))
    return filled(sql.replace("{bin}", cases), **upper, **numbers)


def filled_list(sql: str, name: str, numbers: Sequence[int]) -> str:
    """The statement with whole numbers in place of `name`, joined by commas; of none, with 0, which no row has."""
    return sql.format(**{name: listed(numbers)}) + ";"


def listed(numbers: Sequence[int]) -> str:
    """Whole numbers, joined by commas; of none, 0, which no row has."""
    return ", ".join(str(int(one)) for one in numbers) or "0"
