/* The inner loops of the gateway: reads events of the usual shape into columns, and tells events that nobody acts on.

   `usual.py` has the same in Python and says what it is for. A delta that brings more than words goes to Python as it
   came, and is read there. This takes an event only where every byte of it is as
   expected, and leaves all others to Python: whatever is odd ends the loop, nothing of that event is kept. Nothing is
   read beyond the end of the bytes at hand; depth, alternatives and texts are bounded. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define MOST_TOPS 32
#define MOST_DEPTH 16
#define MOST_TEXT 1024 /* bytes of a text with escapes */

typedef struct { const char *at, *end; int escaped; } Text;
typedef struct { const char *at, *end; } Reader;
typedef struct {
  Text token, content, delta;
  double logprob;
  long long id;
  int tops, plain, has_content;
  Text top_token[MOST_TOPS];
  double top_logprob[MOST_TOPS];
} Event;

/* ---- JSON: each returns 1, or 0 where it is not what it should be ---- */

static inline int byte(Reader *r, char c) { return r->at < r->end && *r->at == c ? (r->at++, 1) : 0; }

static inline int word(Reader *r, const char *w, size_t n) {
  if ((size_t)(r->end - r->at) < n || memcmp(r->at, w, n)) return 0;
  r->at += n;
  return 1;
}
#define WORD(r, w) word(r, w, sizeof(w) - 1)

static inline void space(Reader *r) { while (r->at < r->end && *r->at == ' ') r->at++; }

static int text(Reader *r, Text *t) {
  if (!byte(r, '"')) return 0;
  t->at = r->at;
  t->escaped = 0;
  for (; r->at < r->end; r->at++) {
    unsigned char c = (unsigned char)*r->at;
    if (c == '"') { t->end = r->at++; return 1; }
    if (c < 0x20) return 0;
    if (c == '\\') {
      t->escaped = 1;
      if (++r->at == r->end || !strchr("\"\\/bfnrtu", *r->at) || !*r->at) return 0;
      if (*r->at == 'u') {
        if (r->end - r->at < 5) return 0;
        for (int i = 1; i <= 4; i++) {
          unsigned char h = (unsigned char)r->at[i] | 0x20;
          if (!((r->at[i] >= '0' && r->at[i] <= '9') || (h >= 'a' && h <= 'f'))) return 0;
        }
        r->at += 4;
      }
    }
  }
  return 0;
}

/* A text of which nothing is kept: where nobody reads it again, only such as any reader takes. */
static int skip_text(Reader *r, int again) {
  Text t;
  if (!text(r, &t)) return 0;
  if (!again)
    for (const char *c = t.at; c < t.end; c++)
      if ((unsigned char)*c >= 0x80) return 0;
  return 1;
}

static int digits(Reader *r) {
  const char *from = r->at;
  while (r->at < r->end && *r->at >= '0' && *r->at <= '9') r->at++;
  return (int)(r->at - from);
}

/* By the grammar; where its parts are. */
static int number(Reader *r, int *whole) {
  byte(r, '-');
  const char *from = r->at;
  int n = digits(r);
  *whole = 1;
  if (!n || (n > 1 && *from == '0')) return 0;
  if (byte(r, '.')) { *whole = 0; if (!digits(r)) return 0; }
  if (r->at < r->end && (*r->at == 'e' || *r->at == 'E')) {
    *whole = 0;
    r->at++;
    if (r->at < r->end && (*r->at == '+' || *r->at == '-')) r->at++;
    if (!digits(r)) return 0;
  }
  return 1;
}

static int whole_number(Reader *r, long long *value) {
  const char *from = r->at;
  int whole;
  if (!number(r, &whole) || !whole || r->at - from > 18) return 0;
  int minus = *from == '-';
  long long n = 0;
  for (const char *c = from + minus; c < r->at; c++) n = n * 10 + (*c - '0');
  *value = minus ? -n : n;
  return 1;
}

/* The double nearest to m / 10^k, ties to even; 0 < m, k <= 19. Exact: the quotient has 55 bits or more, and what is
   left over counts in the last place. */
#ifdef __SIZEOF_INT128__
static double divided(uint64_t m, int k) {
  static const uint64_t tens[20] = {1ull, 10ull, 100ull, 1000ull, 10000ull, 100000ull, 1000000ull, 10000000ull,
    100000000ull, 1000000000ull, 10000000000ull, 100000000000ull, 1000000000000ull, 10000000000000ull,
    100000000000000ull, 1000000000000000ull, 10000000000000000ull, 100000000000000000ull, 1000000000000000000ull,
    10000000000000000000ull};
  int shift = __builtin_clzll(m) + 60;
  unsigned __int128 n = (unsigned __int128)m << shift, q = n / tens[k];
  if (q * tens[k] != n) q |= 1;
  uint64_t high = (uint64_t)(q >> 64);
  int bits = high ? 128 - __builtin_clzll(high) : 64 - __builtin_clzll((uint64_t)q);
  int drop = bits - 55; /* two bits beyond a double's 53: half and what sticks */
  if (drop > 0) {
    int sticks = (q & (((unsigned __int128)1 << drop) - 1)) != 0;
    q = (q >> drop) | sticks;
  } else drop = 0;
  uint64_t v = (uint64_t)q;
  int low = (int)(v & 3);
  v >>= 2;
  v += low == 3 || (low == 2 && (v & 1));
  double d = (double)v;
  for (int e = drop + 2 - shift; e; ) { /* powers of two are exact; the result is far from the smallest doubles */
    int s = e < -60 ? -60 : e > 60 ? 60 : e;
    d = s < 0 ? d / (double)(1ull << -s) : d * (double)(1ull << s);
    e -= s;
  }
  return d;
}
#endif

static int real(Reader *r, double *value) {
  const char *from = r->at;
  int whole;
  if (!number(r, &whole)) return 0;
  size_t n = (size_t)(r->at - from);
#ifdef __SIZEOF_INT128__
  int minus = *from == '-', seen = 0, after = 0, point = 0;
  uint64_t m = 0;
  const char *c = from + minus;
  for (; c < r->at && *c != 'e' && *c != 'E' && seen <= 19; c++) {
    if (*c == '.') { point = 1; continue; }
    seen += m || *c != '0';
    after += point;
    if (seen <= 19) m = m * 10 + (uint64_t)(*c - '0');
  }
  if (c == r->at && seen <= 19 && after <= 19 && m) {
    double d = divided(m, after);
    *value = minus ? -d : d;
    return 1;
  }
#endif
  char copy[64];
  if (n >= sizeof copy) return 0;
  memcpy(copy, from, n);
  copy[n] = 0;
  *value = PyOS_string_to_double(copy, NULL, NULL);
  if (*value == -1.0 && PyErr_Occurred()) { PyErr_Clear(); return 0; }
  return *value < 1e300 && *value > -1e300;
}

static int skip(Reader *r, int depth, int again) {
  int whole;
  if (r->at == r->end || depth > MOST_DEPTH) return 0;
  switch (*r->at) {
    case '"': return skip_text(r, again);
    case 't': return WORD(r, "true");
    case 'f': return WORD(r, "false");
    case 'n': return WORD(r, "null");
    case '[':
      r->at++; space(r);
      if (byte(r, ']')) return 1;
      do { space(r); if (!skip(r, depth + 1, again)) return 0; space(r); } while (byte(r, ','));
      return byte(r, ']');
    case '{':
      r->at++; space(r);
      if (byte(r, '}')) return 1;
      do {
        space(r);
        if (!skip_text(r, again)) return 0;
        space(r);
        if (!byte(r, ':')) return 0;
        space(r);
        if (!skip(r, depth + 1, again)) return 0;
        space(r);
      } while (byte(r, ','));
      return byte(r, '}');
    default: return number(r, &whole);
  }
}

/* ---- the shape: members that are known are taken by `take`, others skipped; none may come twice ---- */

typedef int (*Take)(Reader *r, Event *e, int which);
static int take_delta(Reader *r, Event *e, int which);

static int members(Reader *r, Event *e, const char *const *names, Take take, unsigned *seen) {
  *seen = 0;
  if (!byte(r, '{')) return 0;
  space(r);
  if (byte(r, '}')) return 1;
  do {
    Text name;
    int which = 0;
    space(r);
    if (!text(r, &name) || name.escaped) return 0;
    size_t n = (size_t)(name.end - name.at);
    for (size_t i = 0; i < n; i++)
      if ((unsigned char)name.at[i] >= 0x80) return 0;
    while (names[which] && (strlen(names[which]) != n || memcmp(names[which], name.at, n))) which++;
    space(r);
    if (!byte(r, ':')) return 0;
    space(r);
    if (names[which]) {
      if (*seen & 1u << which) return 0;
      *seen |= 1u << which;
      if (!take(r, e, which)) return 0;
    } else if (!skip(r, 0, take == take_delta)) return 0;
    space(r);
  } while (byte(r, ','));
  return byte(r, '}');
}

/* In all lists the members that must be null, where they come at all, stand at the end. */

static const char *const TOP[] = {"token", "logprob", "id", NULL};
static int take_top(Reader *r, Event *e, int which) {
  if (which == 0) return text(r, &e->top_token[e->tops]);
  return which == 1 ? real(r, &e->top_logprob[e->tops]) : WORD(r, "null");
}

static const char *const ENTRY[] = {"token", "logprob", "top_logprobs", "id", NULL};
static int take_entry(Reader *r, Event *e, int which) {
  unsigned seen;
  if (which == 0) return text(r, &e->token);
  if (which == 1) return real(r, &e->logprob);
  if (which == 3) return WORD(r, "null");
  if (WORD(r, "null")) return 1;
  if (!byte(r, '[')) return 0;
  space(r);
  if (byte(r, ']')) return 1;
  do {
    space(r);
    if (e->tops == MOST_TOPS || !members(r, e, TOP, take_top, &seen) || (seen & 3) != 3) return 0;
    e->tops++;
    space(r);
  } while (byte(r, ','));
  return byte(r, ']');
}

static const char *const LOGPROBS[] = {"content", "tokens", "token_logprobs", "top_logprobs", NULL};
static int take_logprobs(Reader *r, Event *e, int which) {
  unsigned seen;
  if (which) return WORD(r, "null");
  if (!byte(r, '[')) return 0;
  space(r);
  if (!members(r, e, ENTRY, take_entry, &seen) || (seen & 3) != 3) return 0;
  space(r);
  return byte(r, ']');
}

static const char *const DELTA[] = {"content", NULL};
static int take_delta(Reader *r, Event *e, int which) {
  (void)which;
  if (WORD(r, "null")) return 1;
  e->has_content = 1;
  return text(r, &e->content);
}
/* Whether what was skipped of a delta says nothing: no more than `role`, and nulls. */
static int says_nothing(Reader *from, const char *end) {
  Reader r = {from->at + 1, end};
  for (;;) {
    Text name, value;
    space(&r);
    if (byte(&r, '}')) return 1;
    if (!text(&r, &name)) return 0;
    space(&r); byte(&r, ':'); space(&r);
    size_t n = (size_t)(name.end - name.at);
    int known = (n == 7 && !memcmp(name.at, "content", 7)) || (n == 4 && !memcmp(name.at, "role", 4));
    if (!WORD(&r, "null") && !(known && text(&r, &value))) return 0;
    space(&r); byte(&r, ',');
  }
}

static const char *const CHOICE[] = {"index", "delta", "logprobs", "token_ids", "finish_reason", "text", "message",
                                     "response_token_ids", "prompt_token_ids", NULL};
static int take_choice(Reader *r, Event *e, int which) {
  unsigned seen;
  long long zero;
  Reader from = *r;
  switch (which) {
    case 0: return whole_number(r, &zero) && !zero;
    case 1:
      if (!members(r, e, DELTA, take_delta, &seen)) return 0;
      e->plain = says_nothing(&from, r->at);
      e->delta = (Text){from.at, r->at, 0};
      return 1;
    case 2: return members(r, e, LOGPROBS, take_logprobs, &seen) && (seen & 1);
    case 3:
      if (!byte(r, '[')) return 0;
      space(r);
      if (!whole_number(r, &e->id)) return 0;
      space(r);
      return byte(r, ']');
    default: return WORD(r, "null");
  }
}

static const char *const CHUNK[] = {"choices", "usage", "error", "prompt_token_ids", "sglext", "__verbose", NULL};
static int take_chunk(Reader *r, Event *e, int which) {
  unsigned seen;
  if (which) return WORD(r, "null");
  if (!byte(r, '[')) return 0;
  space(r);
  if (!members(r, e, CHOICE, take_choice, &seen) || (seen & 14) != 14) return 0;
  space(r);
  return byte(r, ']');
}

static int event(Reader *r, Event *e) {
  unsigned seen;
  e->tops = e->plain = e->has_content = 0;
  return WORD(r, "data: ") && members(r, e, CHUNK, take_chunk, &seen) && (seen & 1) && WORD(r, "\n\n");
}

/* ---- Python's side ---- */

static PyObject *string(const Text *t) {
  if (!t->escaped) return PyUnicode_DecodeUTF8(t->at, t->end - t->at, NULL);
  char out[MOST_TEXT];
  size_t n = 0;
  if (t->end - t->at > MOST_TEXT - 4) { PyErr_SetNone(PyExc_ValueError); return NULL; }
  for (const char *c = t->at; c < t->end; c++) {
    if (*c != '\\') { out[n++] = *c; continue; }
    switch (*++c) {
      case 'b': out[n++] = '\b'; break;
      case 'f': out[n++] = '\f'; break;
      case 'n': out[n++] = '\n'; break;
      case 'r': out[n++] = '\r'; break;
      case 't': out[n++] = '\t'; break;
      case 'u': {
        unsigned v = 0;
        for (int i = 0; i < 4; i++) {
          unsigned h = (unsigned char)*++c;
          v = v << 4 | (h <= '9' ? h - '0' : (h | 0x20) - 'a' + 10);
        }
        if (v >= 0xD800 && v < 0xE000) { PyErr_SetNone(PyExc_ValueError); return NULL; }
        if (v < 0x80) out[n++] = (char)v;
        else if (v < 0x800) { out[n++] = (char)(0xC0 | v >> 6); out[n++] = (char)(0x80 | (v & 63)); }
        else {
          out[n++] = (char)(0xE0 | v >> 12); out[n++] = (char)(0x80 | (v >> 6 & 63)); out[n++] = (char)(0x80 | (v & 63));
        }
        break;
      }
      default: out[n++] = *c;
    }
  }
  return PyUnicode_DecodeUTF8(out, (Py_ssize_t)n, NULL);
}

enum { TEXTS, IDS, LOGPROBS_, COUNTS, TOP_TEXTS, TOP_IDS, TOP_LOGPROBS, PIECES, LISTS };

/* Append what an event says: 1, 0 where it cannot be said (nothing is appended), -1 with an exception. */
static int keep(const Event *e, PyObject **lists) {
  PyObject *made[5 + 3 * MOST_TOPS] = {NULL};
  int into[5 + 3 * MOST_TOPS], n = 0, good = 1;
#define MAKE(list, value) do { into[n] = list; if (!(made[n] = (value))) { good = 0; goto done; } n++; } while (0)
  MAKE(TEXTS, string(&e->token));
  MAKE(IDS, PyLong_FromLongLong(e->id));
  MAKE(LOGPROBS_, PyFloat_FromDouble(e->logprob));
  MAKE(COUNTS, PyLong_FromLong(e->tops));
  if (!e->plain) MAKE(PIECES, PyBytes_FromStringAndSize(e->delta.at, e->delta.end - e->delta.at));
  else if (e->has_content && e->content.end > e->content.at) MAKE(PIECES, string(&e->content));
  for (int i = 0; i < e->tops; i++) {
    MAKE(TOP_TEXTS, string(&e->top_token[i]));
    Py_INCREF(Py_None);
    MAKE(TOP_IDS, Py_None);
    MAKE(TOP_LOGPROBS, PyFloat_FromDouble(e->top_logprob[i]));
  }
  for (int i = 0; i < n; i++)
    if (PyList_Append(lists[into[i]], made[i])) { good = -1; break; }
done:
  for (int i = 0; i < n; i++) Py_DECREF(made[i]);
  if (!good) {
    if (!PyErr_ExceptionMatches(PyExc_ValueError)) return -1; /* UnicodeDecodeError is one */
    PyErr_Clear();
  }
  return good;
}

static PyObject *take_usual(PyObject *self, PyObject *args) {
  PyObject *bytes, *lists[LISTS];
  Py_ssize_t start;
  (void)self;
  if (!PyArg_ParseTuple(args, "SnO!O!O!O!O!O!O!O!", &bytes, &start, &PyList_Type, &lists[0], &PyList_Type, &lists[1],
                        &PyList_Type, &lists[2], &PyList_Type, &lists[3], &PyList_Type, &lists[4], &PyList_Type,
                        &lists[5], &PyList_Type, &lists[6], &PyList_Type, &lists[7]))
    return NULL;
  const char *data = PyBytes_AsString(bytes);
  Py_ssize_t size = PyBytes_Size(bytes);
  if (start < 0 || start > size) { PyErr_SetString(PyExc_ValueError, "the start lies outside of the bytes"); return NULL; }
  Reader r = {data + start, data + size};
  Event e;
  while (r.at < r.end) {
    const char *from = r.at;
    int kept = event(&r, &e) && !(e.token.end - e.token.at >= 9 && !memcmp(e.token.at, "token_id:", 9));
    if (kept && (kept = keep(&e, lists)) < 0) return NULL;
    if (!kept) { r.at = from; break; }
  }
  return PyLong_FromSsize_t(r.at - data);
}

static PyObject *calm(PyObject *self, PyObject *bytes) {
  (void)self;
  if (!PyBytes_Check(bytes)) { PyErr_SetString(PyExc_TypeError, "bytes are needed"); return NULL; }
  const char *data = PyBytes_AsString(bytes), *end = data + PyBytes_Size(bytes), *c;
  if (end - data < 2 || end[-1] != '\n' || end[-2] != '\n' || memchr(data, '\r', (size_t)(end - data))) Py_RETURN_FALSE;
  for (c = data; (c = memchr(c, '[', (size_t)(end - c))); c++) {
    if (end - c >= 6 && !memcmp(c, "[DONE]", 6)) Py_RETURN_FALSE;
    if (c + 1 < end && c[1] == ']') {
      const char *name = c - data >= 1 && c[-1] == ' ' ? c - 1 : c;
      if (name - data >= 10 && !memcmp(name - 10, "\"choices\":", 10)) Py_RETURN_FALSE;
    }
  }
  for (c = data; (c = memchr(c, '_', (size_t)(end - c))); c++)
    if (c - data >= 5 && end - c >= 7 && !memcmp(c - 5, "\"tool_calls\"", 12)) Py_RETURN_FALSE;
  Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
  {"take_usual", take_usual, METH_VARARGS, "As in usual.py."},
  {"calm", calm, METH_O, "As in usual.py."},
  {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_wire", NULL, 0, methods, slots, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__wire(void) { return PyModuleDef_Init(&module); }
