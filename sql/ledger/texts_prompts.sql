-- The beginnings of the prompts of some groups, packed int32, of each no more than `most` tokens; of a turn what it adds to the turn before.
SELECT group_id, purpose, substr(prompt, 1, CAST(4 * :most AS integer)) AS prompt FROM groups WHERE group_id IN :group_ids;
