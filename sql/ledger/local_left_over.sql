-- Samples that were superseded and whose prompts were not generated again: their run finished before their step.
SELECT s.sample_id, s.reward
FROM samples s
JOIN groups g ON g.group_id = s.group_id AND g.purpose = 'train'
WHERE g.run_id = :run_id AND s.state = 'superseded'
  AND NOT EXISTS (
      SELECT 1 FROM groups n
      WHERE n.run_id = g.run_id AND n.purpose = g.purpose AND n.step = g.step AND n.prompt_index = g.prompt_index AND n.group_id > g.group_id
  );
