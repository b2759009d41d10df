# Makes a repository whose merge of `currency` into `main` has stopped at a conflict.
set -e
# Dates of its own: the same commits, in the same order, whenever and wherever it is made.
commit() {
  GIT_AUTHOR_DATE="$1" GIT_COMMITTER_DATE="$1" git commit -q -a -m "$2"
}
git init -q -b main .
git config user.name "Example Author"
git config user.email author@example.com
printf '__pycache__/\nmake_repository.sh\n' > .gitignore

cat > invoice.py <<'PYTHON'
"""Adds up invoices."""


def total(prices):
    """The sum of the prices."""
    return round(sum(prices), 2)
PYTHON
cat > test_invoice.py <<'PYTHON'
import unittest

from invoice import total


class Total(unittest.TestCase):
    def test_sum(self):
        self.assertEqual(total([1.5, 2.25]), 3.75)
PYTHON
git add -A && commit "2026-01-05T09:00:00Z" "Add up invoices"

git checkout -q -b currency
cat > invoice.py <<'PYTHON'
"""Adds up invoices."""

RATES = {"EUR": 1.0, "USD": 1.25}


def total(prices, currency="EUR"):
    """The sum of the prices, in a currency."""
    return round(sum(prices) * RATES[currency], 2)
PYTHON
commit "2026-01-06T09:00:00Z" "Sums in other currencies"

git checkout -q main
cat > invoice.py <<'PYTHON'
"""Adds up invoices."""


def total(prices, discount=0.0):
    """The sum of the prices, less a discount between 0 and 1."""
    return round(sum(prices) * (1 - discount), 2)
PYTHON
commit "2026-01-07T09:00:00Z" "Discounts"

if git merge currency > /dev/null 2>&1; then
  echo "the merge did not stop" >&2
  exit 1
fi
