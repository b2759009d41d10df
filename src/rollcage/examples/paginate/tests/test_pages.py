import unittest

from pager import page, page_count


class PageCount(unittest.TestCase):
    def test_full_pages(self):
        self.assertEqual(page_count(20, 10), 2)

    def test_a_page_that_is_not_full_counts(self):
        self.assertEqual(page_count(21, 10), 3)


class Pages(unittest.TestCase):
    def test_the_last_page_has_the_rest(self):
        self.assertEqual(page(list("abcde"), 3, 2), ["e"])


if __name__ == "__main__":
    unittest.main()
