export PYTHONPATH=src:. PYTEST_XDIST_WORKER=x WARPLINE_CACHE_DIR=/tmp/wc PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
mkdir -p /tmp/logs
run() { timeout $1 python3 -m pytest -q -p no:cacheprovider -p no:benchmark --durations=3 "${@:3}" > /tmp/logs/$2.txt 2>&1; echo "$2 rc $? $(date +%T) $(tail -n 1 /tmp/logs/$2.txt)"; }
for f in test_engine test_executors test_persistent test_endurance test_torch_exec test_tune test_ladder; do run 190 $f tests/gpu/$f.py & done
run 190 kernels tests/gpu/test_kernels.py -k "admit or report or prompt_embedding or last_rows or append_token or newest" &
wait
for f in test_bench test_hf; do run 60 $f tests/gpu/$f.py; done
for f in /tmp/logs/*.txt; do echo "== $f"; tail -n 6 $f; done > $OUT/tests.txt
cat /tmp/logs/*.txt > $OUT/tests_full.txt
