-- Nodes whose quarantine has not been lifted.
SELECT DISTINCT cluster, node FROM node_quarantines WHERE released_at IS NULL ORDER BY cluster, node;
