-- Which tools with effects outside take longest, and which were asked and never answered?
-- Without an answer, `asked`: the tool works, or its environment worker was lost meanwhile; `unknown`: the episode is over. Nobody asks
-- such a call again. Of each one: SELECT * FROM v_tool_calls WHERE state <> 'answered'.
SELECT r.name AS run, t.tool, count(*) AS calls, count(DISTINCT t.episode_id) AS episodes,
       sum(CASE WHEN t.state = 'asked' THEN 1 ELSE 0 END) AS asked, sum(CASE WHEN t.state = 'unknown' THEN 1 ELSE 0 END) AS unknown,
       round(CAST(avg(t.answered_at - t.asked_at) AS numeric), 3) AS mean_s,
       round(CAST(max(t.answered_at - t.asked_at) AS numeric), 3) AS longest_s,
       round(CAST(sum(t.answered_at - t.asked_at) AS numeric), 3) AS total_s,
       max(t.answer_bytes) AS longest_answer_bytes
FROM v_tool_calls t
JOIN v_runs r ON r.run_id = t.run_id
GROUP BY r.name, t.tool
ORDER BY total_s DESC, r.name, t.tool;
