-- The prompts of some groups, packed int32; of a turn what it adds to the turn before.
SELECT group_id, purpose, prompt FROM groups WHERE group_id IN :group_ids;
