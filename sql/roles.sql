-- Who may read a ledger in PostgreSQL. Run by a superuser, in the ledger's database, after the daemon has made its tables:
--     psql -d scavenger -f sql/roles.sql
-- It changes nothing but rights, may be run again at any time, and is to be run again after an upgrade, which may bring new views.
-- Then, for each person: CREATE ROLE ann LOGIN IN ROLE scavenger_read;
--
--   scavenger_read      sees the views v_...: everything that happened, without tokens, prompts, their metadata or configurations
--   scavenger_contents  sees the tables and decoded tokens (v_sample_tokens) as well
--   the daemon's role   owns the tables and views, and alone writes
--
-- Rights are given on views and not on columns of the tables, so that SELECT * works for every user, a column that a later release
-- adds stays hidden until a view shows it, and the reports of sql/reports run unchanged: they read the views, which SQLite has too.

\set ON_ERROR_STOP on
BEGIN;

DO $$
BEGIN
    IF to_regclass('v_sample_tokens') IS NULL OR to_regclass('alembic_version') IS NULL THEN
        RAISE EXCEPTION 'database % has no ledger on the search path', current_database()
            USING HINT = 'connect to the ledger''s database (psql -d NAME), and start this release''s daemon on it once';
    END IF;
    IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = 'scavenger_read') THEN
        CREATE ROLE scavenger_read NOLOGIN;
    END IF;
    IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = 'scavenger_contents') THEN
        CREATE ROLE scavenger_contents NOLOGIN;
    END IF;
    IF NOT pg_has_role('scavenger_contents', 'scavenger_read', 'MEMBER') THEN
        GRANT scavenger_read TO scavenger_contents;
    END IF;
END
$$;

DO $$
DECLARE
    schema_oid oid := (SELECT relnamespace FROM pg_class WHERE oid = to_regclass('alembic_version'));
    schema_name text := (SELECT nspname FROM pg_namespace WHERE oid = schema_oid);
    daemon oid := (SELECT relowner FROM pg_class WHERE oid = to_regclass('alembic_version'));
    -- What scavenger_read sees, by name: a view that is not here is not seen.
    readable text[] := ARRAY[
        'alembic_version', 'v_attempts', 'v_checkpoints', 'v_chunks', 'v_cluster_polls', 'v_days', 'v_decisions', 'v_events',
        'v_generations', 'v_gpu_allocations', 'v_groups', 'v_job_states', 'v_jobs', 'v_leases', 'v_now', 'v_runs', 'v_sample_ends', 'v_samples',
        'v_steps', 'v_weight_versions', 'v_workers',
        'v_other_users_waits', 'v_training_jobs', 'v_engine_deaths', 'v_node_quarantines', 'v_token_differences', 'v_episodes', 'v_turns', 'v_episode_turns', 'v_tool_calls',
        'v_deliveries', 'v_delivered_turns', 'v_job_runs', 'v_allocation_runs'];
    relation record;
BEGIN
    -- Only the daemon's role makes objects beside the ledger's (older servers let every role).
    EXECUTE format('REVOKE CREATE ON SCHEMA %I FROM PUBLIC, scavenger_read, scavenger_contents', schema_name);
    EXECUTE format('GRANT USAGE, CREATE ON SCHEMA %I TO %I', schema_name, pg_get_userbyid(daemon));
    EXECUTE format('GRANT USAGE ON SCHEMA %I TO scavenger_read, scavenger_contents', schema_name);
    FOR relation IN
        SELECT c.relname FROM pg_class c
        WHERE c.relnamespace = schema_oid AND c.relowner = daemon AND c.relkind IN ('r', 'p', 'v', 'm')
    LOOP
        EXECUTE format('REVOKE ALL ON %I.%I FROM PUBLIC, scavenger_read, scavenger_contents', schema_name, relation.relname);
        EXECUTE format('GRANT SELECT ON %I.%I TO %I', schema_name, relation.relname,
                       CASE WHEN relation.relname = ANY (readable) THEN 'scavenger_read' ELSE 'scavenger_contents' END);
    END LOOP;
END
$$;

COMMIT;
