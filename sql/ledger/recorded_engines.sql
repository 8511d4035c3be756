-- What the run's policy aimed at when it last decided how many harvested engines it wants.
SELECT inputs
FROM decisions
WHERE policy = 'engines' AND subject = :name AND inputs LIKE '%"target"%'
ORDER BY id DESC
LIMIT 1;
