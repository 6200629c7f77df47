#!/usr/bin/env bash
# The routes with curl: ./curl.sh [BASE_URL]
set -euo pipefail
base="${1:-http://127.0.0.1:8080}"

echo "== is it ready?"
curl --silent --show-error --fail "$base/health/ready"
echo

echo "== which models are there, and how busy are they?"
curl --silent --show-error --fail "$base/v1/models"
echo

echo "== an answer in one piece"
curl --silent --show-error --fail "$base/v1/chat/completions" -H 'Content-Type: application/json' -d '{
  "messages": [{"role": "user", "content": "Name three colours."}],
  "max_tokens": 24,
  "temperature": 0
}'
echo

echo "== the same as a stream"
curl --silent --show-error --fail --no-buffer "$base/v1/chat/completions" -H 'Content-Type: application/json' -d '{
  "messages": [{"role": "user", "content": "Name three colours."}],
  "max_tokens": 24,
  "temperature": 0,
  "stream": true,
  "stream_options": {"include_usage": true}
}'

echo "== a text, continued"
curl --silent --show-error --fail "$base/v1/completions" -H 'Content-Type: application/json' -d '{
  "prompt": "The capital of France is",
  "max_tokens": 8,
  "temperature": 0
}'
echo

echo "== an error says what is wrong"
curl --silent --show-error "$base/v1/chat/completions" -H 'Content-Type: application/json' -d '{
  "messages": [{"role": "user", "content": "Hello"}],
  "temperature": 3
}'
echo
