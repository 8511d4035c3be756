-- How many harvested engines the run asked for last, with what its policy reckoned with.
SELECT inputs
FROM decisions
WHERE policy = 'engines' AND subject = :name
ORDER BY id DESC
LIMIT 1;
