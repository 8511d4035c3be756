-- PostgreSQL: what keeps this role from writing the ledger as the daemon does? (Null: nothing.) :tables are the ledger's.
SELECT CASE
    WHEN pg_is_in_recovery() THEN 'the server is a standby, which takes no writes'
    WHEN current_schema() IS NULL THEN 'the role ' || current_user || ' may use no schema of this database'
    WHEN to_regclass('alembic_version') IS NULL THEN
        CASE WHEN NOT has_schema_privilege(current_schema(), 'CREATE')
             THEN 'the role ' || current_user || ' may not make tables in the schema ' || current_schema() END
    ELSE (
        SELECT 'the role ' || current_user || ' may not write rows of ' || CAST(min(CAST(c.relname AS text)) AS text)
               || CASE WHEN count(*) > 1 THEN ' (and of ' || CAST(count(*) - 1 AS text) || ' more tables)' ELSE '' END
        FROM pg_class c
        JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = current_schema() AND c.relkind = 'r' AND CAST(c.relname AS text) = ANY (:tables)
          AND NOT (has_table_privilege(c.oid, 'INSERT') AND has_table_privilege(c.oid, 'UPDATE') AND has_table_privilege(c.oid, 'DELETE'))
        HAVING count(*) > 0
    ) END AS problem;
