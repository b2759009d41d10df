import unittest

from pager import page, page_count


class PageCount(unittest.TestCase):
    def test_every_item_has_a_place(self):
        for size in range(1, 12):
            for total in range(60):
                count = page_count(total, size)
                self.assertTrue((count - 1) * size < total <= count * size or total == count == 0, (total, size))


class Pages(unittest.TestCase):
    def test_all_pages_together_are_the_listing(self):
        for size in range(1, 12):
            for total in range(1, 60):
                items = list(range(total))
                pages = [page(items, number + 1, size) for number in range(page_count(total, size))]
                self.assertEqual([item for found in pages for item in found], items)

    def test_the_last_page_is_the_last(self):
        self.assertEqual(page(list("abcde"), 3, 2), ["e"])
        self.assertEqual(page([], 1, 10), [])
        with self.assertRaises(IndexError):
            page(list("abcde"), 4, 2)
        with self.assertRaises(ValueError):
            page_count(3, 0)
