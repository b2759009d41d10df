import sys
import unittest

# At the end of the path: nothing there can stand in for a module of Python's own.
sys.path.append("/home/user/workdir")
from invoice import total


class Total(unittest.TestCase):
    def test_sum(self):
        self.assertEqual(total([1.5, 2.25]), 3.75)

    def test_discount(self):
        self.assertEqual(total([10, 10], discount=0.25), 15)

    def test_currency(self):
        self.assertEqual(total([10, 10], currency="USD"), 25)

    def test_both(self):
        self.assertEqual(total([10, 10], discount=0.5, currency="USD"), 12.5)


if __name__ == "__main__":
    unittest.main()
