-- What `anomaly report` asks of a record, in tables and views of the connection alone.
CREATE TEMP TABLE words AS SELECT sha256, verdict, defect_type FROM {judged};
CREATE INDEX temp.words_by_image ON words (sha256);
-- The parts of the period (age 0) and of the one before (age 1) with the last word on each.
CREATE TEMP TABLE answered AS SELECT parts.id, time < '{begin}' AS age, model, model_id, time, score, parts.sha256,
    CASE WHEN status <> 'ok' THEN status WHEN parts.verdict = '' THEN 'no verdict'
        ELSE parts.verdict END AS outcome, words.verdict AS word, words.defect_type AS kind,
    COALESCE (json_extract (line, '$.reason'), '') = '' AS by_score, CAST (json_extract (line, '$.review_threshold') AS REAL) AS review,
    CAST (json_extract (line, '$.threshold') AS REAL) AS reject,
    NULLIF (json_extract (line, '$.group'), '') AS views,  -- name of the part, if the image is one of its views
    strftime ('%s', time, 'localtime') - strftime ('%s', time) AS ahead  -- of UTC, in seconds
    FROM main.parts LEFT JOIN words ON words.sha256 = parts.sha256
    WHERE time >= '{earliest}' AND time < '{end}' AND ahead IS NOT NULL ORDER BY parts.id;
-- Of the views of one part, the strictest answer is the part's.
DELETE FROM temp.answered WHERE id IN (SELECT id FROM (SELECT id,
    ROW_NUMBER () OVER (PARTITION BY views, age, model, model_id
        ORDER BY (outcome = 'review') + 2 * (outcome = 'reject') DESC, id DESC) AS place
    FROM answered WHERE views IS NOT NULL) WHERE place > 1);
-- An image that was sent again isn't another part to judge: its strictest answer counts, then its newest;
-- of each version for that version, and of all (once) for the line.
CREATE TEMP TABLE judged AS SELECT *,
    CASE WHEN ROW_NUMBER () OVER (PARTITION BY sha256, age, model, model_id ORDER BY strict DESC, id DESC) > 1
        THEN 'again' ELSE COALESCE (word, '') END AS judged,
    ROW_NUMBER () OVER (PARTITION BY sha256, age ORDER BY strict DESC, id DESC) = 1 AS once
    FROM (SELECT *, (outcome = 'review') + 2 * (outcome = 'reject') AS strict FROM answered);
-- NULL is unknown: a rejected part, or one called good, that nobody has judged.
CREATE TEMP TABLE seen AS SELECT *,
    CASE outcome WHEN 'reject' THEN CASE judged WHEN 'good' THEN 1 WHEN 'defect' THEN 0 END END AS false_reject,
    CASE outcome WHEN 'good' THEN CASE judged WHEN 'good' THEN 0 WHEN 'defect' THEN 1 END END AS escaped
    FROM judged ORDER BY id;
CREATE TEMP VIEW counted AS
    SELECT 1 AS place, 'all parts' AS what, COUNT (*) FILTER (WHERE age = 0) AS now,
        COUNT (*) FILTER (WHERE age = 1) AS before FROM seen
    UNION ALL SELECT CASE what WHEN 'good' THEN 2 WHEN 'review' THEN 3 WHEN 'reject' THEN 4 ELSE 5 END,
        what, COUNT (*) FILTER (WHERE age = 0), COUNT (*) FILTER (WHERE age = 1)
        FROM (SELECT outcome AS what, age FROM seen
            UNION ALL VALUES ('good', 2), ('review', 2), ('reject', 2)) GROUP BY what
    UNION ALL SELECT 7, 'false rejects',
        COALESCE (SUM (false_reject) FILTER (WHERE age = 0 AND once),
            CASE WHEN TOTAL (outcome = 'reject') FILTER (WHERE age = 0) = 0 THEN 0 END),
        COALESCE (SUM (false_reject) FILTER (WHERE age = 1 AND once),
            CASE WHEN TOTAL (outcome = 'reject') FILTER (WHERE age = 1) = 0 THEN 0 END) FROM seen
    UNION ALL SELECT 8, 'escapes',
        COALESCE (SUM (escaped) FILTER (WHERE age = 0 AND once),
            CASE WHEN TOTAL (outcome = 'good') FILTER (WHERE age = 0) = 0 THEN 0 END),
        COALESCE (SUM (escaped) FILTER (WHERE age = 1 AND once),
            CASE WHEN TOTAL (outcome = 'good') FILTER (WHERE age = 1) = 0 THEN 0 END) FROM seen;
CREATE TEMP VIEW yields AS
    WITH totals AS (SELECT NULLIF (1.0 * now, 0) AS now, NULLIF (1.0 * before, 0) AS before
        FROM counted WHERE place = 1)
    SELECT what AS outcome, counted.now AS parts, counted.now / totals.now AS share, counted.before AS before,
        counted.before / totals.before AS "share before",
        CASE WHEN counted.now / totals.now > counted.before / totals.before THEN 'up '
            WHEN counted.now / totals.now < counted.before / totals.before THEN 'down ' END
        || PRINTF ('%.2f points', 100 * ABS (counted.now / totals.now - counted.before / totals.before))
        AS change FROM counted, totals ORDER BY place, what;
CREATE TEMP VIEW judgements AS SELECT outcome AS "the model says",
    SUM (judged = 'good') AS "people say good", SUM (judged = 'defect') AS "people say defect",
    SUM (judged = '') AS "not judged" FROM seen
    WHERE age = 0 AND once AND outcome IN ('good', 'review', 'reject')
    GROUP BY outcome ORDER BY outcome = 'reject', outcome = 'review';
-- All that people have said of these parts, also what counts no more.
CREATE TEMP VIEW said AS SELECT part, strftime ('%Y-%m-%d %H:%M:%S', time, 'localtime') AS time, who,
    verdict, defect_type AS "kind of defect", note, sha256 AS image FROM main.feedback
    WHERE sha256 IN (SELECT sha256 FROM seen WHERE age = 0) ORDER BY id;
CREATE TEMP VIEW versions AS SELECT model || ' ' || model_id AS "model and version",
    strftime ('%Y-%m-%d %H:%M', MIN (time), 'localtime') AS "first part", COUNT (*) AS parts,
    AVG (outcome = 'good') AS good, AVG (outcome = 'review') AS review,
    AVG (outcome = 'reject') AS reject,
    COALESCE (SUM (false_reject), IIF (TOTAL (outcome = 'reject') = 0, 0, 'unknown')) AS "false rejects",
    COALESCE (SUM (escaped), IIF (TOTAL (outcome = 'good') = 0, 0, 'unknown')) AS escapes,
    COUNT (*) FILTER (WHERE false_reject = 0 OR escaped = 0) AS "people agree",
    COUNT (false_reject) + COUNT (escaped) AS judged
    FROM seen WHERE age = 0 GROUP BY model, model_id ORDER BY model, MIN (id);
CREATE TEMP VIEW promised AS SELECT model, model_id, COUNT (*),
    SUM (outcome <> 'good'),
    COALESCE (SUM (false_reject), CASE WHEN TOTAL (outcome = 'reject') = 0 THEN 0 END),
    SUM (judged = 'defect'), SUM (outcome = 'good' AND judged = 'defect') FROM seen
    WHERE age = 0 AND by_score AND outcome IN ('good', 'review', 'reject')
    GROUP BY model, model_id ORDER BY model, MIN (id);
CREATE TEMP VIEW kinds AS SELECT kind AS "kind of defect",
    SUM (outcome = 'reject') AS reject, SUM (outcome = 'review') AS review,
    SUM (outcome = 'good') AS good FROM seen
    WHERE age = 0 AND once AND kind <> '' GROUP BY 1 ORDER BY 2 + 3 DESC, 1;
-- The hour that comes twice when clocks are put back has two rows.
CREATE TEMP VIEW times AS SELECT strftime ('{bucket}', time, 'localtime') || CASE WHEN {hourly}
        THEN PRINTF (' UTC%+03d:%02d', ahead / 3600, ABS (ahead) / 60 % 60) ELSE '' END AS time,
    COUNT (*) AS parts, SUM (outcome = 'good') AS good,
    SUM (outcome = 'review') AS review, SUM (outcome = 'reject') AS reject FROM seen
    WHERE age = 0 GROUP BY 1 ORDER BY MIN (seen.time);
-- The pictures that matter: escapes, rejects that people overruled, what lies at a threshold.
CREATE TEMP VIEW notable AS
    WITH ranked AS (SELECT id, judged, review, reject,
        CASE WHEN escaped THEN 1 WHEN false_reject THEN 2 ELSE 3 END AS why,
        CASE WHEN false_reject THEN -score / reject WHEN escaped THEN score / reject
            ELSE MIN (ABS (score - reject), ABS (score - review)) / reject END AS rank,
            MIN (ABS (score / reject - 1), ABS (score / review - 1)) <= 0.2 AS is_near
        FROM seen WHERE age = 0 AND reject > 0 AND once AND id IN (SELECT part FROM main.pictures)),
    placed AS (SELECT *, ROW_NUMBER () OVER (PARTITION BY why ORDER BY rank, id) AS place FROM ranked)
    SELECT why, placed.id, judged, model, strftime ('%Y-%m-%d %H:%M:%S', time, 'localtime'),
        CAST (json_extract (line, '$.path') AS TEXT), parts.verdict, parts.score, review, reject, heatmap FROM placed
    JOIN main.parts ON parts.id = placed.id JOIN main.pictures ON pictures.part = placed.id
    WHERE CASE why WHEN 3 THEN is_near ELSE place <= 4 END ORDER BY why, place LIMIT 10;
