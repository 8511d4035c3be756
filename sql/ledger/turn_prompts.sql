-- Turns with all turns that their prompts begin with: the parent's sample and turn, how much of it they share, and what they add.
WITH RECURSIVE chain AS (
    SELECT u.group_id, u.parent_id FROM turns u WHERE u.group_id IN :group_ids
    UNION
    SELECT u.group_id, u.parent_id
    FROM chain c
    JOIN samples p ON p.sample_id = c.parent_id
    JOIN turns u ON u.group_id = p.group_id
)
SELECT u.group_id, u.parent_id, p.group_id AS parent_group, u.prefix_len, u.prompt_tokens, u.prompt_sha256, g.prompt
FROM chain c
JOIN turns u ON u.group_id = c.group_id
JOIN groups g ON g.group_id = u.group_id
LEFT JOIN samples p ON p.sample_id = u.parent_id
ORDER BY u.group_id;
