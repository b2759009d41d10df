import sys
import unittest

# At the end of the path: nothing there can stand in for a module of Python's own.
sys.path.append("/home/user/workdir")
from pager import page, page_count


class PageCount(unittest.TestCase):
    def test_every_item_has_a_place(self):
        for size in range(1, 12):
            for total in range(60):
                count = page_count(total, size)
                self.assertTrue((count - 1) * size < total <= count * size or total == count == 0, (total, size))

    def test_a_size_below_one_is_refused(self):
        with self.assertRaises(ValueError):
            page_count(3, 0)


class Pages(unittest.TestCase):
    def test_all_pages_together_are_the_listing(self):
        for size in range(1, 12):
            for total in range(1, 60):
                items = list(range(total))
                pages = [page(items, number + 1, size) for number in range(page_count(total, size))]
                self.assertEqual([item for found in pages for item in found], items)

    def test_there_is_nothing_after_the_last_page(self):
        with self.assertRaises(IndexError):
            page(list("abcde"), 4, 2)

    def test_an_empty_listing_has_an_empty_first_page(self):
        self.assertEqual(page([], 1, 10), [])


if __name__ == "__main__":
    unittest.main()
