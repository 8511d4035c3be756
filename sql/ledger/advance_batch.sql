-- The fence of every transaction: move this daemon's own generation from one batch to the next, unless it is superseded. Where no
-- row changes, another daemon owns the ledger, or the batch was committed before and its answer was lost.
UPDATE generations
SET batch = batch + 1, committed_at = :now
WHERE generation = :mine AND uid = :my_uid AND batch = :before AND superseded_at IS NULL;
