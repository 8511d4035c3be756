-- Steps from `first` to `last` that a run submitted groups for, in order.
SELECT DISTINCT g.step FROM groups g
WHERE g.run_id = :run_id AND g.purpose = :purpose AND g.step >= :first AND g.step <= :last
ORDER BY g.step;
