#!/usr/bin/env bash
# What needs a GPU: parity in each dtype, the suite's tests that concern the device, and both under
# compute-sanitizer; but for the mutation run of whole decode steps, which is the suite's
# (CONTRIBUTING).
# A test is a process of its own: one that hangs, or breaks the device, takes no other with it.
set -euo pipefail
cd "$(dirname "$0")/.."
usage() {
  cat <<'END'
usage: tests/gpu.sh [PART[:PATTERN]...]
parts, all of them where none is named:
  parity     every operation against its reference, in f32, bf16 and f16
  suite      the suite without data, runs, resume, serving and cli, which are the same on every backend
  memcheck   parity in f32 and whole decode steps under compute-sanitizer's memcheck
  racecheck  kernels for Hopper under compute-sanitizer's racecheck, in bf16
PATTERN, a regular expression, picks tests of a part by "RUN TEST", as in parity:^f16 or memcheck:attention.
from the environment:
  FIRECLAY_PARITY, FIRECLAY_SUITE, FIRECLAY_BINARY  the compiled tests and the program; built where one is missing
  FIRECLAY_GPU_LOGS     where a log of each part is left (target/gpu)
  FIRECLAY_GPU_SECONDS  how long a part may take (470)
  FIRECLAY_GPU_JOBS     how many tests run side by side at the most (16; some parts take fewer)
  FIRECLAY_TEST_STRICT  1, the default: a test fails if it leaves something out; 0: that is counted as skipped
END
}
stop() { echo "tests/gpu.sh: $1" >&2; exit 2; }
[ $# -gt 0 ] || set -- parity suite memcheck racecheck
needed=()
for asked in "$@"; do
  case ${asked%%:*} in
    parity | racecheck) needed+=(FIRECLAY_PARITY) ;;
    suite) needed+=(FIRECLAY_SUITE FIRECLAY_BINARY) ;;
    memcheck) needed+=(FIRECLAY_PARITY FIRECLAY_SUITE FIRECLAY_BINARY) ;;
    -h | --help) usage; exit ;;
    *) stop "there is no part $asked; see --help" ;;
  esac
done

export FIRECLAY_TEST_BACKEND=cuda FIRECLAY_TEST_STRICT="${FIRECLAY_TEST_STRICT:-1}" RUST_BACKTRACE=0
export CUDA_PATH="${CUDA_PATH:-/usr/local/cuda}"
logs=${FIRECLAY_GPU_LOGS:-target/gpu}
mkdir -p "$logs"
out=$(mktemp -d)
# shellcheck disable=SC2046
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "$out"' EXIT

build() {
  command -v cargo >/dev/null || stop 'no cargo here: give FIRECLAY_PARITY, FIRECLAY_SUITE and FIRECLAY_BINARY'
  cargo test --profile ci --workspace --features cuda --no-run --message-format json >"$out/build.json"
  # The program is built as its own unit tests, too.
  python3 - "$out/build.json" >"$out/built" <<'END'
import json, sys
names = {
    ("parity", "test"): "FIRECLAY_PARITY",
    ("suite", "test"): "FIRECLAY_SUITE",
    ("fireclay", "bin"): "FIRECLAY_BINARY",
}
for it in map(json.loads, open(sys.argv[1])):
    name = it.get("executable") and names.get((it["target"]["name"], it["target"]["kind"][0]))
    if name and it["profile"]["test"] == (name != "FIRECLAY_BINARY"):
        print(name, it["executable"])
END
  local name path
  while read -r name path; do [ -n "${!name:-}" ] || export "$name=$path"; done <"$out/built"
}
for name in "${needed[@]}"; do
  [ -n "${!name:-}" ] || build
  [ -f "${!name:-}" ] && [ -x "${!name}" ] || stop "$name is no program: ${!name:-}"
  # Tests run in other folders, too.
  export "$name=$(readlink -f "${!name}")"
done

tests_of() {
  timeout 60 "$1" --list 2>/dev/null | sed -n 's/: test$//p' | grep -v '^mutation::' ||
    record failed "$part" "all of $1" "$SECONDS" 'the binary lists no tests'
}
# Puts tests in the queue: plan RUNS DTYPES BINARY TEST..; a run is a line of the table, and has a dtype.
plan() {
  local test run
  for test in "${@:4}"; do
    for run in $1; do
      if [[ "$run $test" =~ $pattern ]]; then tasks+=("$1"$'\t'"$2"$'\t'"$3"$'\t'"$test"); break; fi
    done
  done
}

parity() {
  local dtypes='f32 bf16 f16' tests
  # Those that compile for minutes begin first, or the others would wait for them at the end.
  local slow='attention_matches_the_reference$|in_half_precision_are|attention_in_half|skinny|few_rows|norms_of_half'
  mapfile -t tests < <(
    tests_of "$FIRECLAY_PARITY" | awk -v slow="$slow" '{ print ($0 ~ slow ? 0 : 1), $0 }' | sort | cut -d' ' -f2
  )
  plan "$dtypes" "$dtypes" "$FIRECLAY_PARITY" "${tests[@]}"
}
suite() {
  at_once=4 # Some take the time, and some start further programs.
  local test tests
  mapfile -t tests < <(tests_of "$FIRECLAY_SUITE" | grep -vE '^(data|runs|resume|serving|cli)::')
  for test in "${tests[@]}"; do plan "${test%%::*}" f32 "$FIRECLAY_SUITE" "$test"; done
}

# Has tests run under a tool of compute-sanitizer's; fails where there is none.
under_sanitizer() {
  local sanitizer none="$part: compute-sanitizer is neither on the PATH nor in $CUDA_PATH/bin"
  sanitizer=$(command -v compute-sanitizer || command -v "$CUDA_PATH/bin/compute-sanitizer") ||
    { record skipped "$part" "all of $part" "$SECONDS" "$none"; return 1; }
  # Kernels are slow there, and shall not give each other up.
  under=(env FIRECLAY_WAIT_SECONDS=3600 "$sanitizer" --target-processes application-only "$@")
}
memcheck() {
  under_sanitizer --tool memcheck || return 0
  at_once=8 # It has ports for ten processes.
  # Each tensor is an allocation of its own, or what runs from one into the next would not be seen.
  folder=$out/memcheck
  mkdir -p "$folder"
  printf '[memory]\npersistent_memory = "enforced"\n' >"$folder/cubecl.toml"
  # The recorder and the tool both want CUPTI; the others do not come to the device.
  local tests left_out='^(recorder|compare|mutation)::|^threads::tensors_of_another_thread_are_refused'
  left_out+='|^whole_steps::(a_step_of_few_rows|experts::a_step_of_a_mixture)_is_one_operation'
  # Whole steps first: they take longest.
  mapfile -t tests < <(tests_of "$FIRECLAY_SUITE" | grep '^whole_steps::' | grep -vE "$left_out" | sort -r)
  plan whole_steps f32 "$FIRECLAY_SUITE" "${tests[@]}"
  mapfile -t tests < <(tests_of "$FIRECLAY_PARITY" | grep -vE "$left_out")
  plan parity f32 "$FIRECLAY_PARITY" "${tests[@]}"
}

# Not large feed-forward layers nor the head's loss over a large vocabulary, for which 126 GB of
# host memory are not enough, nor whole decode steps, which do not end.
raced=(
  linear::products_are_right_behind_a_rehearsal_of_them
  linear::products_of_f32_are_as_accurate_as_sums_of_f32
  attention::attention_of_heads_of_64_and_128_is_close_to_the_reference_under_every_mask
  head_loss::head_loss_in_half_precision_has_the_gradients_of_the_reference_whatever_the_chunk
  norm::norms_of_half_precision_rows_are_close_to_the_reference
  linear::large_projections_match_the_reference
  linear::fused_projections_match_the_reference # has the activations of feed-forward layers
  linear::projections_of_few_rows_match_the_reference
  experts::experts_in_half_precision_are_close_to_dense_layers_and_repeat_their_bits
  lora::projections_with_adapters_in_half_precision_are_close_to_the_reference
)
racecheck() {
  # All of Hopper's kernels together: where one is left out, the tool fails.
  under_sanitizer --tool racecheck --racecheck-report analysis \
    --kernel-name kns=hopper --kernel-name kns=attention_documents --kernel-name kns=experts_few_rows || return 0
  under=(env FIRECLAY_RACECHECK=1 "${under[@]}")
  at_once=1 # It takes much of the host's memory.
  local test
  for test in "${raced[@]}"; do plan "${test%%::*}" bf16 "$FIRECLAY_PARITY" "ops::$test"; done
}

# A line of a part's results: record STATUS RUN TEST BEGAN WHY.
record() { printf '%s\t%s\t%s\t%s\t%s\t%s\n' "${@:1:4}" "$SECONDS" "${5//$'\t'/ }" >>"$results"; }
log_of() { echo "$results-$1-${2//::/.}"; }

one_test() {
  local run=$1 dtype=$2 binary=$3 test=$4 began=$SECONDS code=0 left=$((deadline - SECONDS))
  local log status=passed why reason
  log=$(log_of "$run" "$test")
  [ "$left" -gt 0 ] || { record failed "$run" "$test" "$began" 'did not begin in time'; return; }
  # Should memory run out, this ends first.
  echo 1000 2>/dev/null >/proc/self/oom_score_adj || true
  cd "$folder"
  FIRECLAY_TEST_DTYPE=$dtype timeout -k 5 "$left" "${under[@]}" "$binary" --exact "$test" --nocapture \
    </dev/null >"$log" 2>&1 &
  # shellcheck disable=SC2064
  trap "kill $! 2>/dev/null; exit 1" TERM
  wait $! 2>/dev/null || code=$?
  while read -r reason; do record skipped "$run" "$test" "$began" "$reason"; done < <(
    sed -nE 's/^skip [0-9]+: ([^:]|::)+: //p' "$log"
  )
  why=$(faults | paste -sd'|' | sed 's/ *|/; /g' | cut -c1-700)
  [ -z "$why" ] || status=failed
  if [ ${#under[@]} -gt 0 ] && grep -qi 'device not supported' "$log"; then
    status=skipped why='compute-sanitizer does not support this device'
  fi
  record "$status" "$run" "$test" "$began" "$why"
}

# A test in the first of its dtypes, and then in the others, side by side; once where it does not ask for the dtype.
in_each_dtype() {
  local test=$4 at first=1
  local -a runs dtypes
  read -ra runs <<<"$1"
  read -ra dtypes <<<"$2"
  for at in "${!runs[@]}"; do
    [[ "${runs[at]} $test" =~ $pattern ]] || continue
    if [ -n "$first" ]; then
      first=
      one_test "${runs[at]}" "${dtypes[at]}" "$3" "$test"
      grep -q '^dtype under test' "$(log_of "${runs[at]}" "$test")" 2>/dev/null || return 0
    else
      one_test "${runs[at]}" "${dtypes[at]}" "$3" "$test" &
    fi
  done
  wait
}

# What is wrong with a test, by its log and exit code, a line each.
faults() {
  sed -nE 's/.*warning: (.* does not run here)/\1/p' "$log" | sort -u
  case $code:$((SECONDS >= deadline)) in 124:* | 137:1) echo 'did not end in time'; return ;; esac
  # Tests of refusals panic on purpose: the last message is the one that counts, where a test failed.
  [ "$code" = 0 ] ||
    awk '/panicked at/ { after = 1; next } after && NF { last = $0; after = 0 } END { print last }' "$log"
  [ "$code" = 0 ] || echo "ended with $code"
  [ "$code" != 0 ] || grep -q '1 passed; 0 failed' "$log" || echo 'no such test ran'
  if [ ${#under[@]} -gt 0 ] && ! grep -qE ' SUMMARY: 0 (errors|hazards displayed \(0 errors, 0 warnings\))' "$log"; then
    sed -nE 's/^=+ *((Error|ERROR|Warning|Invalid|Race|Program hit|Internal).*)/\1/p' "$log" | sort -u | sed -n 1,4p
    grep -q ' SUMMARY: ' "$log" || echo 'compute-sanitizer gave no summary'
  fi
}

run_part() {
  part=${1%%:*} folder=$PWD at_once=16 tasks=() under=()
  results=$(mktemp -p "$out") pattern=${1#"$part"} pattern=${pattern#:}
  "$part"
  local began=$SECONDS task runs run dtypes binary test
  deadline=$((began + ${FIRECLAY_GPU_SECONDS:-470}))
  at_once=$(printf '%s\n' "$at_once" "$(nproc)" "${FIRECLAY_GPU_JOBS:-16}" | sort -n | head -n 1)
  [ ${#tasks[@]} != 0 ] || [ -s "$results" ] ||
    record failed "$part" "all of $part" "$began" "no test is found by $pattern"
  for task in "${tasks[@]}"; do
    while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do wait -n || true; done
    IFS=$'\t' read -r runs dtypes binary test <<<"$task"
    in_each_dtype "$runs" "$dtypes" "$binary" "$test" &
  done
  wait
  for task in "${tasks[@]}"; do
    IFS=$'\t' read -r runs dtypes binary test <<<"$task"
    grep -qF $'\t'"$test"$'\t' "$results" || record failed "${runs%% *}" "$test" "$began" 'left no result'
    for run in $runs; do
      [ -f "$(log_of "$run" "$test")" ] || continue
      printf '\n== %s, %s\n' "$run" "$test"
      cat "$(log_of "$run" "$test")"
    done
  done >"$logs/${1//[^[:alnum:]]/-}.log"
  # Without a pattern each run has tests.
  for run in $([ -n "$pattern" ] || printf '%s\n' "${tasks[@]}" | cut -f 1 | tr ' ' '\n' | sort -u); do
    grep -q $'\t'"$run"$'\t' "$results" || record failed "$run" "all of $part" "$began" 'no test asks for this dtype'
  done
  printf '\n%s, %s at a time, %s s\n' "$1" "$at_once" "$((SECONDS - began))"
  show
}

# The table of a part, what failed in it and what was skipped.
show() {
  printf '%-20s %10s %10s %10s %10s\n' run passed failed skipped seconds
  awk -F'\t' '
    $2 != "" && !($2 in first) { runs[++n] = $2; first[$2] = 1e9 }
    { count[$2, $1]++; if ($4 < first[$2]) first[$2] = $4; if ($5 > last[$2]) last[$2] = $5 }
    END { for (i = 1; i <= n; i++) { run = runs[i]; printf "%-20s %10d %10d %10d %10d\n", run, count[run, "passed"],
      count[run, "failed"], count[run, "skipped"], last[run] - first[run] } }' "$results"
  # Under each reason the tests that have it.
  sed -nE 's/^failed\t(.*)\t(.*)\t.*\t.*\t(.*)/failed, \1: \3\t\2/p' "$results" | sort |
    while IFS=$'\t' read -r why test; do
      [ "$why" = "${last:-}" ] || fold -s -w 100 <<<"$why"
      last=$why
      printf '  %s\n' "$test"
    done
  sed -n 's/^skipped\t.*\t//p' "$results" | sort | uniq -c |
    sed -E 's/^ *([0-9]+) /skipped, \1 times: /' | fold -s -w 100
  cut -f 1 "$results" >>"$out/statuses"
}

{ nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo 'no nvidia-smi'; } | paste -sd';'
date -u '+%F %H:%M UTC'
for asked in "$@"; do run_part "$asked"; done
number() { grep -cx "$1" "$out/statuses" || true; }
printf '\n%s passed, %s failed, %s skipped\n' "$(number passed)" "$(number failed)" "$(number skipped)"
[ "$(number failed)" = 0 ]
