-- Nodes whose quarantine has not been lifted.
SELECT DISTINCT node FROM node_quarantines WHERE released_at IS NULL ORDER BY node;
