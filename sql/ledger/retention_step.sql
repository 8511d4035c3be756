-- A run's first steps, of training and of evaluation, after `done` and up to `bound`, with a sample whose contents are as they came or
-- what another policy made of them (`before`; '' for none). Each half walks the index over groups and stops at its first find.
SELECT step FROM (
    SELECT g.step FROM groups g
    WHERE g.run_id = :run_id AND g.purpose = 'train' AND g.step > :done AND g.step <= :bound
      AND EXISTS (SELECT 1 FROM samples s WHERE s.group_id = g.group_id AND (s.contents IS NULL OR s.contents = :before))
    ORDER BY g.step LIMIT 1
) train
UNION ALL
SELECT step FROM (
    SELECT g.step FROM groups g
    WHERE g.run_id = :run_id AND g.purpose = 'eval' AND g.step > :done AND g.step <= :bound
      AND EXISTS (SELECT 1 FROM samples s WHERE s.group_id = g.group_id AND (s.contents IS NULL OR s.contents = :before))
    ORDER BY g.step LIMIT 1
) eval;
