-- Which tools with effects outside take longest, and which were asked and never answered?
-- A call without an answer is in doubt: its environment worker was lost meanwhile, and nobody asks it again.
SELECT r.name AS run, t.tool, count(*) AS calls, count(DISTINCT t.episode_id) AS episodes,
       count(*) - count(t.answered_at) AS without_answer,
       round(CAST(avg(t.answered_at - t.asked_at) AS numeric), 3) AS mean_s,
       round(CAST(max(t.answered_at - t.asked_at) AS numeric), 3) AS longest_s,
       round(CAST(sum(t.answered_at - t.asked_at) AS numeric), 3) AS total_s,
       max(t.answer_bytes) AS longest_answer_bytes
FROM v_tool_calls t
JOIN v_runs r ON r.run_id = t.run_id
GROUP BY r.name, t.tool
ORDER BY total_s DESC, r.name, t.tool;
